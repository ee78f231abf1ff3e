package pgoutbox

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"time"
)

// lead is one shard that this process leads, from the moment its lock was taken until it is given back or lost.
type lead struct {
	consumer int64
	shard    int
	term     int64
	key      int64  // of the advisory lock
	born     uint64 // the last tick before it; positions stored by others are older than any later tick

	ctx context.Context // ends with cause ErrLeadershipLost, or nil when it was given back
	end context.CancelCauseFunc
	of  *leadership
}

func newLead(g *leadership, c *claim, row stored) *lead {
	l := &lead{consumer: c.consumer, shard: row.shard, term: row.term, key: c.keys[row.shard], born: g.n, of: g}
	l.ctx, l.end = context.WithCancelCause(context.Background())
	return l
}

// trusted reports whether the lead may still be acted on. It is asked right before every emission: a process that was
// paused learns here, not from a timer that may fire late, that its time is over.
func (l *lead) trusted() bool { return l.ctx.Err() == nil && l.of.trusted() }

// trusts reports whether a leader may act at now: the session last proved itself with a statement sent at sent. Counted from
// when it was sent, not answered: a slow answer must not stretch the lease beyond what the server grants. By the wall clock
// too, because the monotonic one stands still while a machine sleeps.
func trusts(sent, now time.Time, lease, margin time.Duration) bool {
	elapsed := max(now.Sub(sent), now.Round(0).Sub(sent.Round(0)))
	return elapsed < lease-margin
}

// lockKey is the advisory lock of one shard: the first 8 bytes of a sha256, so that different outboxes, consumers and shards
// do not meet by accident as they would with base + number. Each part is preceded by its length: ("a", "bc") is not ("ab",
// "c").
func lockKey(base int64, n names, consumer int64, shard int) int64 {
	var text []byte
	part := func(b []byte) {
		text = binary.BigEndian.AppendUint32(text, uint32(len(b)))
		text = append(text, b...)
	}
	number := func(v int64) { part(binary.BigEndian.AppendUint64(nil, uint64(v))) }
	number(base)
	part([]byte(n.schema))
	part([]byte(n.table))
	number(consumer)
	number(int64(shard))
	sum := sha256.Sum256(text)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}
