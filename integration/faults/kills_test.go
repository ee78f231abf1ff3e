//go:build unix

package faults

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-14: processes are killed at random points between emit, publish, ack and save, 200 of them in the full run, while eight writers
// write. Nothing is lost or made up; what comes again was out, or acked too shortly before the kill to be stored; first deliveries of a
// key keep its order; and although MaxAttempts is 3, no row is blamed for a kill.
func TestFC14_KillsLoseNothingAndBlameNoRow(t *testing.T) {
	const shards, inFlight = 4, 8
	for _, bridge := range []bool{false, true} {
		t.Run(map[bool]string{false: "subscriber", true: "bridge"}[bridge], func(t *testing.T) {
			db, j := newOutbox(t), NewJournal()
			role := Role{
				Bridge: bridge, Shards: shards, Lanes: inFlight, Work: time.Millisecond, MaxAttempts: 3,
				Retry: 50 * time.Millisecond, Lease: 2 * time.Second, Save: 100 * time.Millisecond,
			}
			var stops []func()
			for writer := range 8 {
				stops = append(stops, db.write(func(n int) string { return fmt.Sprintf("key %d of writer %d", n%5, writer) }))
			}
			killed := map[int]time.Time{}
			for range outboxtest.Rounds(200) / 2 {
				left := 1 + rand.IntN(60)
				p := db.start(role, j)
				db.wait("some rows", j, func(d Delivery) bool {
					if d.PID == p.PID {
						left--
					}
					return left <= 0
				})
				outboxtest.Pause(t.Context(), time.Duration(rand.IntN(150))*time.Millisecond) // a save may lie in between
				p.Kill()
				killed[p.PID] = time.Now()
			}
			for _, stop := range stops {
				stop()
			}
			db.start(role, j)
			deliveries := db.waitForAll(j)
			repeats := 0
			for id, log := range deliveries {
				for i, again := range log[1:] {
					repeats++
					// Before an ack is stored there may be: the work, half a second of saves that a kill's round trip kept back, and a busy machine.
					if before := log[i]; killed[before.PID].Sub(before.At) > 2*time.Second || again.PID == before.PID {
						t.Errorf("row %d came again by %d at %v, and no kill explains it: before by %d at %v, killed at %v",
							id, again.PID, again.At, before.PID, before.At, killed[before.PID])
					}
				}
			}
			mustKeepOrder(t, deliveries)
			t.Logf("%d kills, %d rows, %d repeats", len(killed), len(deliveries), repeats)
			if got := outboxtest.Ask[int](db.Outbox, "SELECT count(*)::int FROM outbox_parked"); got != 0 {
				t.Errorf("%d rows are parked", got)
			}
			if repeats == 0 {
				t.Error("the trap is none: no kill met a row that was out")
			}
		})
	}
}

// mustKeepOrder demands that the first deliveries of each key came in the order of their ids.
func mustKeepOrder(t *testing.T, deliveries map[int64][]Delivery) {
	t.Helper()
	byKey := map[string][]Delivery{}
	for _, log := range deliveries {
		byKey[log[0].Key] = append(byKey[log[0].Key], log[0])
	}
	for key, first := range byKey {
		slices.SortFunc(first, func(a, b Delivery) int { return int(a.ID - b.ID) })
		if !slices.IsSortedFunc(first, func(a, b Delivery) int { return a.At.Compare(b.At) }) {
			t.Errorf("INVERSION in key %q", key)
		}
	}
}
