//go:build unix

package faults

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// Somebody's migration holds a table lock for longer than the lease. What waits for it is given up and told; nobody takes the
// shards over, no message in a handler's hands is lost, and all goes on afterwards.
func TestTableLockCostsNoLead(t *testing.T) {
	const (
		shards = 3
		slow   = 40 // rows that are acked while the lock is held
	)
	everything := []string{
		"LOCK TABLE outbox_cursors, outbox, outbox_consumers, outbox_epochs IN ACCESS EXCLUSIVE MODE",
		"ALTER SEQUENCE outbox_id_seq RENAME TO other",
	}
	tests := []struct {
		name  string
		lock  []string
		lease time.Duration
		says  string // "" when nothing of ours needs what is locked
	}{
		{"the cursors", []string{"LOCK TABLE outbox_cursors IN ACCESS EXCLUSIVE MODE"}, lease, "a position was not saved"},
		{"the rows", []string{"ALTER TABLE outbox ADD COLUMN later int"}, lease, ""},
		{"the sequence", []string{"ALTER SEQUENCE outbox_id_seq RENAME TO other"}, lease, "a tick was given up"},
		{"everything", everything, lease, "a tick was given up"},
		// Here the waits of one poll's statements add up to more than one statement may take.
		{"everything under a longer lease", everything, 8 * time.Second, "a tick was given up"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			cfg := pgoutbox.SubscriberConfig{Shards: shards, Lease: test.lease}
			r, other := db.subscriber(cfg), db.subscriber(cfg)
			r.mustRead()
			db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'held')")
			held := outboxtest.Next(db, "the row", r.held)
			db.AwaitLocks(shards)
			other.mustRead()
			db.awaitStandby()
			leader, term := db.leader(), outboxtest.Ask[int64](db.Outbox, terms)
			db.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'slow ' || i, 'slow' FROM generate_series(1, $1::int) AS i", slow)
			var working []*message.Message
			for range slow {
				working = append(working, outboxtest.Next(db, "a slow row", r.slow))
			}

			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer tx.Rollback(context.WithoutCancel(t.Context()))
			for _, sql := range test.lock {
				if _, err := tx.Exec(t.Context(), sql); err != nil {
					t.Fatal(err)
				}
			}
			began := time.Now()
			for time.Since(began) < max(2*lease, test.lease) {
				outboxtest.Pause(t.Context(), 20*time.Millisecond)
				if done := int(time.Since(began) / (200 * time.Millisecond)); done > 0 && len(working) > max(slow-done, 0) {
					working[0].Ack() // so that there is always something to save
					working = working[1:]
				}
				if n := outboxtest.Ask[int](db.Outbox, locks); n != shards {
					t.Fatalf("%d advisory locks are held after %v", n, ms(time.Since(began)))
				}
			}
			if l := db.leader(); l != leader {
				t.Errorf("session %d leads, no longer %d", l, leader)
			}
			if err := held.Context().Err(); err != nil {
				t.Errorf("the message ended: %v", context.Cause(held.Context()))
			}
			if test.says != "" && !strings.Contains(r.log.String(), test.says) {
				t.Errorf("nobody says %q", test.says)
			}
			if strings.Contains(r.log.String(), "the lock session ended") {
				t.Error("the lock session was given up")
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			free := time.Now()
			held.Ack()
			for _, msg := range working {
				msg.Ack()
			}
			db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'after')")
			after := outboxtest.Next(db, "a row that was written afterwards", r.held)
			after.Ack()
			t.Logf("locked for %v; a new row came %v later", ms(free.Sub(began)), ms(time.Since(free)))
			db.awaitSaved(shards)
			if now := outboxtest.Ask[int64](db.Outbox, terms); now != term || db.leader() != leader {
				t.Errorf("there were %d terms, now there are %d", term, now)
			}
			if len(other.got)+len(other.held) > 0 {
				t.Error("the other process got rows")
			}
			db.cursorsNeverWentBack()
		})
	}
}
