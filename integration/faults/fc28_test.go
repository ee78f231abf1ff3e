//go:build unix

package faults

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-28: between any two answers that the lock session gets, a transaction with a lower number commits and one with a higher begins.
// Nothing falls between what the answers say.
func TestFC28_NothingFallsBetweenTwoAnswers(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 1, LockConn: db.dsnOf(p), PollInterval: 20 * time.Millisecond, SaveInterval: 20 * time.Millisecond})
	ended := r.mustRead()
	times := map[string]int{}
	insert := func(on outboxtest.Execer, uuid string, args ...any) {
		db.ExecOn(on, "INSERT INTO outbox (topic, uuid) VALUES ('orders', $1)", fmt.Sprintf(uuid, args...))
	}
	boundaries := 0
	for at := int64(1); at <= 40; at++ { // a tick is about 16 messages, with a save 20
		lower := db.Begin()
		insert(lower, "lower %d", at)
		insert(db.Pool, "between %d", at) // there is something to tick for
		var n atomic.Int64
		held := make(chan struct{}, 1)
		p.Set(ToClient, func(m Message) ([]byte, bool) {
			if n.Add(1) == at {
				held <- struct{}{}
				return nil, true
			}
			return m, false
		})
		outboxtest.Next(t, "the message to hold", held)
		higher := db.Begin()
		insert(higher, "higher %d", at)
		db.Commit(lower)
		insert(db.Pool, "above %d", at)
		p.Pass(ToClient)
		boundaries++
		r.drained(t, times)
		db.Commit(higher)
	}
	r.drained(t, times)
	for uuid, n := range times {
		if n != 1 {
			t.Errorf("%s came %d times", uuid, n)
		}
	}
	t.Logf("%d boundaries, %d rows", boundaries, len(times))
	db.Must(r.sub.Close())
	<-ended
}
