//go:build unix

package cases_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-83: readers that have nothing to do use up transaction ids and write WAL.
func TestFC83_IdleReadersWriteNothing(t *testing.T) {
	t.Parallel()
	// Whatever else writes of itself is switched off.
	server := ownServer(t, map[string]string{"autovacuum": "off", "wal_level": "minimal", "max_wal_senders": "0", "checkpoint_timeout": "1h"})
	ob, s := newOutboxIn(t, server.Database(t)), newSink()
	ob.Exec("DROP TRIGGER log_cursor ON outbox_cursors") // it writes, too
	var readers []*reader
	for _, name := range []string{"P1", "P2", "P3"} {
		readers = append(readers, ob.read(t, name, s, ackAll))
	}
	for shard := range 16 { // each shard was saved at another time
		ob.put(t, ob.KeyIn(shard, 16, 0), fmt.Sprintf("m%d", shard))
		d := s.await(t, 10*time.Second, fmt.Sprintf("m%d", shard))
		outboxtest.Eventually(t, 10*time.Second, "the ack is stored", func() (bool, string) {
			c := ob.Cursors()[shard]
			return c.Past(d.Row.ID) && len(c.Pending) == 0, fmt.Sprintf("%+v", c)
		})
	}
	outboxtest.Pause(t.Context(), time.Second) // and whatever follows from it

	type mark struct{ xid, wal int64 }
	look := func() mark {
		return mark{
			outboxtest.Ask[int64](ob.Outbox, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"),
			outboxtest.Ask[int64](ob.Outbox, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"),
		}
	}
	before := look()
	outboxtest.Pause(t.Context(), outboxtest.Length(60*time.Second))
	after := look()
	t.Logf("%d transaction ids, %d bytes of WAL", after.xid-before.xid, after.wal-before.wal)
	if used := after.xid - before.xid; used > 2 {
		t.Errorf("idle readers used %d transaction ids", used)
	}
	if wrote := after.wal - before.wal; wrote > 8<<10 { // idle consumers may save once a minute
		t.Errorf("idle readers wrote %d bytes of WAL", wrote)
	}
	for _, r := range readers {
		r.close(t)
	}
}
