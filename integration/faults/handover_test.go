//go:build unix

package faults

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// The lock session ends while a backlog drains. The process knows at once: it emits nothing more for the term, and what it
// acks late, and had not saved yet, moves nothing.
func TestEndedSessionEmitsNothingMore(t *testing.T) {
	const (
		shards = 4
		poll   = 100 * time.Millisecond // the product's own
		save   = 500 * time.Millisecond // long enough that one is due
	)
	db, j := newOutbox(t), NewJournal()
	db.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'hold', 'held' FROM generate_series(1, 1)")
	db.put(10_000)
	role := Role{Shards: shards, Lanes: 8, Work: 10 * time.Millisecond, Save: save}
	first := role
	first.Hold, first.Retry = "hold", 10*time.Second // it will not be the one to take over
	a := db.start(first, j)
	held := db.wait("the held row", j, func(d Delivery) bool { return d.Key == "hold" })
	b := db.start(role, j)
	db.awaitStandby()
	n := 0
	db.wait("half a thousand rows", j, func(Delivery) bool { n++; return n > 500 })

	db.Exec("SELECT pg_terminate_backend($1)", db.leader())
	ended := time.Now()
	taken := db.wait("a row by the other", j, func(d Delivery) bool { return d.PID == b.PID })
	db.wait("the held row by the other", j, func(d Delivery) bool { return d.PID == b.PID && d.ID == held.ID })
	if err := a.Ack(); err != nil {
		t.Fatal(err)
	}
	deliveries := db.waitForAll(j)
	db.awaitSaved(shards)
	db.AwaitSessions(2) // the first has come back, and stands by

	last := time.Duration(0)
	for _, d := range j.Of(func(d Delivery) bool { return d.PID == a.PID }) {
		last = max(last, d.At.Sub(ended))
		if d.Term != held.Term {
			t.Errorf("the first process emitted row %d in term %d", d.ID, d.Term)
		}
	}
	t.Logf("the old process emitted for %v after the end of its session, the other one took over after %v", ms(last), ms(taken.At.Sub(ended)))
	if last > poll+slack/2 {
		t.Errorf("the old process emitted for %v", last)
	}
	if took := taken.At.Sub(ended); took > time.Second+slack {
		t.Errorf("the other one took over after %v", took)
	}
	repeated := 0
	for id, all := range deliveries {
		if len(all) == 1 {
			continue
		}
		repeated++
		if id != held.ID && all[0].At.Before(ended.Add(-save-slack)) {
			t.Errorf("row %d was delivered %v before the end and came again", id, ended.Sub(all[0].At))
		}
	}
	t.Logf("%d of %d rows were delivered twice", repeated, len(deliveries))
	if len(deliveries[held.ID]) != 2 {
		t.Errorf("the held row was delivered %d times, want twice", len(deliveries[held.ID]))
	}
	db.cursorsNeverWentBack()
	const stale = "SELECT count(*)::int FROM cursor_log AS h WHERE term = 1 AND n > (SELECT min(n) FROM cursor_log WHERE term = 2 AND shard = h.shard)"
	if n := outboxtest.Ask[int](db.Outbox, stale); n > 0 {
		t.Errorf("the old term moved cursors %d times", n)
	}
}

// A process dies without a word: its sockets are closed by the kernel, so the other one has the locks with its next try.
func TestKilledProcessIsReplaced(t *testing.T) {
	const (
		shards = 4
		rounds = 5
	)
	db, j := newOutbox(t), NewJournal()
	stop := db.write(anotherKey)
	role := Role{Shards: shards, Lanes: 8}
	leading := db.start(role, j)
	db.AwaitLocks(shards)
	var times []time.Duration
	for range rounds {
		standby := db.start(role, j)
		db.awaitStandby()
		outboxtest.Pause(t.Context(), rand.N(500*time.Millisecond)) // anywhere between two tries
		db.wait("a row by the leader", j, func(d Delivery) bool { return d.PID == leading.PID })

		killed := time.Now()
		leading.Kill()
		seen := map[int]bool{}
		taken := db.wait("a row of every shard by the other", j, func(d Delivery) bool {
			if d.PID == standby.PID {
				seen[d.Shard] = true
			}
			return len(seen) == shards
		})
		times = append(times, ms(taken.At.Sub(killed)))
		leading = standby
	}
	t.Logf("after kill -9 every shard was emitted again after a median of %v, of %v", ms(median(times)), times)
	if m := median(times); m > time.Second+slack {
		t.Errorf("take-over takes %v, 1s is promised", m)
	}
	stop()
	db.waitForAll(j)
	db.cursorsNeverWentBack()
}

func anotherKey(n int) string { return fmt.Sprintf("key %d", n) }

// write inserts a row every 5 ms until stop.
func (db *outbox) write(key func(n int) string) (stop func()) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() { // stop waits for it
		defer close(done)
		ticks := time.NewTicker(5 * time.Millisecond)
		defer ticks.Stop()
		for n := 0; ; n++ {
			if _, err := db.Pool.Exec(db.Context(), "INSERT INTO outbox (topic, key, uuid) VALUES ('orders', $1, 'row')", key(n)); err != nil {
				db.Error(err)
				return
			}
			select {
			case <-ticks.C:
			case <-quit:
				return
			}
		}
	}()
	return func() {
		close(quit)
		<-done
	}
}

// A process is paused for longer than its lease. The server ends its session, the other one takes over, and when the first
// goes on, each of its lanes may finish what it had begun: one item.
func TestPausedProcessIsReplaced(t *testing.T) {
	const (
		shards = 2
		lanes  = 8
		lease  = 2 * time.Second
	)
	for _, one := range []struct {
		name string
		role Role
	}{
		{"subscriber", Role{Lanes: lanes / shards, Work: 10 * time.Millisecond}}, // MaxInFlight is per shard
		{"subscriber that is waited for", Role{Lanes: lanes / shards, Serial: true, Work: 2 * time.Millisecond}},
		{"bridge", Role{Bridge: true, Lanes: lanes, Work: 10 * time.Millisecond}},
	} {
		t.Run(one.name, func(t *testing.T) {
			db, j := newOutbox(t), NewJournal()
			db.put(2_500)
			role := one.role
			role.Shards, role.Lease = shards, lease
			a := db.start(role, j)
			db.AwaitLocks(shards)
			b := db.start(role, j)
			db.awaitStandby()
			n := 0
			before := db.wait("some rows", j, func(Delivery) bool { n++; return n > 300 })

			paused := time.Now()
			if err := a.Pause(); err != nil {
				t.Fatal(err)
			}
			taken := db.wait("a row by the other", j, func(d Delivery) bool { return d.PID == b.PID })
			n = 0
			db.wait("some rows by the other", j, func(d Delivery) bool {
				if d.PID == b.PID {
					n++
				}
				return n > 100
			})
			resumed := time.Now()
			if err := a.Resume(); err != nil {
				t.Fatal(err)
			}
			deliveries := db.waitForAll(j)
			db.AwaitSessions(2) // the first has come back
			late := j.Of(func(d Delivery) bool { return d.PID == a.PID && d.Term == before.Term && d.At.After(resumed) })
			repeated := 0
			for id, all := range deliveries {
				if len(all) == 1 {
					continue
				}
				repeated++
				if at := all[0].At; at.Before(paused.Add(-slack)) {
					t.Errorf("row %d was delivered %v before the pause and came again", id, paused.Sub(at))
				}
			}
			took := taken.At.Sub(paused)
			t.Logf("paused with a lease of %v: the other one took over after %v; resumed, the first emitted %d items of the old term over %d lanes; "+
				"%d of %d rows came twice", lease, ms(took), len(late), lanes, repeated, len(deliveries))
			if took > lease+time.Second+slack {
				t.Errorf("the other one took over after %v", took)
			}
			if took < lease-slack/2 {
				t.Errorf("the other one took over after %v, while the first could be within its lease", took)
			}
			if len(late) > lanes {
				t.Errorf("the paused process emitted %d items of the old term", len(late))
			}
			db.cursorsNeverWentBack()
		})
	}
}
