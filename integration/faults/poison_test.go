//go:build unix

package faults

import (
	"fmt"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// One row ends the process that handles it, again and again. It is found out among everything that was out with it, and parked; nothing
// else is, and nothing is lost.
func TestRowThatEndsItsProcessIsParked(t *testing.T) {
	const (
		shards = 4
		deaths = 3 // MaxAttempts
		rows   = 2000
	)
	for _, bridge := range []bool{false, true} {
		t.Run(map[bool]string{false: "subscriber", true: "bridge"}[bridge], func(t *testing.T) {
			db, j := newOutbox(t), NewJournal()
			db.put(rows / 2)
			db.Exec("INSERT INTO outbox (topic, key) VALUES ('orders', 'poison')")
			db.put(rows / 2)
			poison := outboxtest.Ask[int64](db.Outbox, "SELECT id FROM outbox WHERE key = 'poison'")
			role := Role{
				Bridge: bridge, Shards: shards, Lanes: 8, Work: time.Millisecond, Poison: "poison", MaxAttempts: deaths,
				Retry: 50 * time.Millisecond, Lease: 2 * time.Second,
			}
			for n := 0; outboxtest.Ask[int](db.Outbox, "SELECT count(*)::int FROM outbox_parked") == 0; n++ {
				if n > 5*deaths {
					t.Fatalf("%d processes ended and nothing is parked", n)
				}
				p := db.start(role, j)
				db.eventuallyOr(p, "the row is parked", "SELECT count(*) = 1 FROM outbox_parked")
			}
			db.waitForAll(j)
			const parked = "SELECT string_agg(row_id || ' ' || attempts || ' ' || last_error, ', ') FROM outbox_parked"
			if got := outboxtest.Ask[string](db.Outbox, parked); got != fmt.Sprintf(
				"%d %d %d leaders ended while this row alone was out", poison, deaths, deaths) {
				t.Errorf("parked: %s; the poison is %d", got, poison)
			}
			out := len(j.Of(func(d Delivery) bool { return d.Key == "poison" }))
			t.Logf("%d processes ended before the row was parked", out)
			if out > deaths+1+rows/shards/64 {
				t.Errorf("the row went out %d times", out)
			}
		})
	}
}

// eventuallyOr polls the database until a condition holds or the process has ended.
func (db *outbox) eventuallyOr(p *Process, what, sql string) {
	db.Helper()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	giveUp := time.NewTimer(outboxtest.Patience)
	defer giveUp.Stop()
	for !outboxtest.Ask[bool](db.Outbox, sql) {
		select {
		case <-p.Done():
			return
		case <-again.C:
		case <-giveUp.C:
			db.Fatalf("never happened: %s", what)
		}
	}
}
