//go:build unix

package cases_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-05: transaction ids start anew on the server that the outbox was brought to. The reader stopped in the middle: rows are
// out and not acked, rows of a transaction that committed late lie behind its position, rows lie before it. On the new server some
// are written before a reader comes, and some are being written when it does. Nothing is lost, and what was acked does not come
// again.
func TestFC05_AnotherServerGoesOnWhereTheFirstEnded(t *testing.T) {
	t.Parallel()
	for name, move := range moves {
		t.Run(name, func(t *testing.T) { // one after the other: two servers each
			from, source, target := twoServers(t)
			s := newSink()
			held := leaveHalfRead(t, source, s)
			move(t, from, source, target)
			target.committed = source.oracle()

			target.put(t, "k1", numbered("written before the relay came", 10)...)
			if name == "subscription" {
				target.mustRefuse(t, "ALTER SUBSCRIPTION \"mover\" DISABLE")
				target.Exec("ALTER SUBSCRIPTION mover DISABLE")
			}
			open := target.begin(t)
			must(t, open.publish("open", numbered("open when the relay came", 5)...))
			target.KeepHistory()
			first := target.reader(t, fourShards)
			second := target.reader(t, fourShards)
			committed := make(chan error, 1)
			go func() { committed <- open.commitOnceWaitedFor(t.Context()) }()
			first.subscribe(t, "first", s, ackAll)
			second.subscribe(t, "second", s, ackAll)
			must(t, <-committed)
			target.put(t, "k2", numbered("written after", 20)...)
			target.probe(t, s, 10*time.Second)
			target.judge(t, s)
			times := map[string]int{}
			for _, one := range target.oracle() {
				times[one.uuid] = 1
			}
			for _, uuid := range held {
				times[uuid] = 2
			}
			s.mustHaveCome(t, times)
			s.mustKeepOrder(t)
			if epochs := target.Text("SELECT string_agg(epoch::text, ',' ORDER BY epoch) FROM outbox_epochs"); epochs != "1,2" {
				t.Errorf("epochs %s", epochs)
			}
			first.close(t)
			second.close(t)
		})
	}
}

func fourShards(c *pgoutbox.SubscriberConfig) { c.Shards = 4 }

// mustRefuse demands that a relay says what to do instead of starting.
func (ob *outbox) mustRefuse(t *testing.T, says string) {
	t.Helper()
	r := ob.reader(t, fourShards)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := r.tryOpen(ctx); err == nil || !strings.Contains(err.Error(), says) {
		t.Fatalf("the relay started with %v, which does not say %s", err, says)
	}
	r.close(t)
}

func numbered(what string, n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("%s %d", what, i)
	}
	return out
}

// leaveHalfRead leaves an outbox as a reader does that stopped in the middle, and returns what was out.
func leaveHalfRead(t *testing.T, ob *outbox, s *sink) (held []string) {
	t.Helper()
	ob.ageBy(3000)
	late := ob.begin(t)
	must(t, late.publish("late", numbered("late", 15)...))
	for i := range 40 {
		ob.put(t, fmt.Sprintf("k%d", i%5), fmt.Sprintf("first %d", i))
	}
	ob.put(t, "tail", numbered("tail", 20)...)
	held = []string{"first 20", "first 36", "tail 0"}
	r := ob.read(t, "before the move", s, newGate(held...).handle, fourShards)
	s.await(t, 20*time.Second, held...)
	outboxtest.Eventually(t, 10*time.Second, "the positions list what is out, and what waits behind it", func() (bool, string) {
		n := 0
		for _, c := range ob.Cursors() {
			n += len(c.Pending)
		}
		return n == len(held)+len([]string{"first 25", "first 30", "first 35"}), fmt.Sprint(n)
	})
	r.close(t)
	must(t, late.Commit(t.Context()))
	ob.put(t, "k3", numbered("second", 20)...)
	if n := len(s.All()); n != 40-3+1 {
		t.Fatalf("the trap is none: %d were delivered", n)
	}
	return held
}

// commitOnceWaitedFor commits when a relay waits for it.
func (w *writing) commitOnceWaitedFor(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for waits := false; !waits; {
		const sql = "SELECT count(*) > 0 FROM pg_locks WHERE mode = 'ShareRowExclusiveLock' AND NOT granted"
		if err := w.ob.Pool.QueryRow(ctx, sql).Scan(&waits); err != nil {
			return fmt.Errorf("no relay waits for who writes: %w", err)
		}
	}
	return w.Commit(ctx)
}

// mustKeepOrder demands that the first deliveries of each key came in the order of their ids.
func (s *sink) mustKeepOrder(t *testing.T) {
	t.Helper()
	seen, last := map[string]bool{}, map[string]delivery{}
	for _, d := range s.All() {
		if d.Row.Key == "" || seen[d.UUID] {
			continue
		}
		if before := last[d.Row.Key]; before.Row.ID > d.Row.ID {
			t.Errorf("INVERSION: %q came after %q", d.UUID, before.UUID)
		}
		seen[d.UUID], last[d.Row.Key] = true, d
	}
}
