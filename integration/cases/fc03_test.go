package cases_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-03: the lock session is ended from outside while handlers work. What they finish then must not count, and the process
// must not believe that a new connection has the old locks.
func TestFC03_LostLockSessionEndsTheLead(t *testing.T) {
	t.Parallel()
	const (
		notice   = 2 * time.Second // the end of a session is seen at once; this is for a busy machine
		inFlight = 10
	)
	ob, s := newOutbox(t), newSink()
	var held []string
	for n := range inFlight {
		held = append(held, fmt.Sprintf("m%d", n))
		ob.put(t, "", held[n])
	}
	ended, finish, lost := make(chan struct{}), make(chan struct{}), make(chan error, inFlight)
	p1 := ob.read(t, "P1", s, func(ctx context.Context, d delivery) error {
		if d.Row.Term > 1 {
			return nil
		}
		select {
		case <-ctx.Done():
			lost <- context.Cause(ctx)
		case <-ended:
			lost <- errors.New("it goes on")
		}
		<-finish
		return nil // a handler that does not look at its context, and acks late
	}, func(c *pgoutbox.SubscriberConfig) { c.Shards, c.RetryInterval = 1, 5*time.Second })
	s.await(t, 10*time.Second, held...)
	ob.awaitPending(t, ob.ID(held[inFlight-1]), ids(t, ob, held)...)

	p2 := ob.read(t, "P2", s, ackAll, func(c *pgoutbox.SubscriberConfig) { c.RetryInterval = 50 * time.Millisecond })
	pids := ob.LockSessions()
	if len(pids) != 1 {
		t.Fatalf("the sessions with locks are %v, want P1's", pids)
	}
	ob.Exec("SELECT pg_terminate_backend($1)", pids[0])
	timer := time.AfterFunc(notice, func() { close(ended) })
	defer timer.Stop()
	for range inFlight {
		if err := <-lost; !errors.Is(err, pgoutbox.ErrLeadershipLost) {
			t.Errorf("the context of a message in flight: %v, want ErrLeadershipLost", err)
		}
	}
	for n := range 20 {
		ob.put(t, fmt.Sprintf("key %d", n%3), fmt.Sprintf("after %d", n))
	}
	s.Await(t, 15*time.Second, func(log []delivery) (bool, string) {
		byP2 := 0
		for _, d := range log {
			if d.Reader == "P2" {
				byP2++
			}
		}
		return byP2 >= inFlight+20, fmt.Sprintf("P2 delivered %d messages, want %d", byP2, inFlight+20)
	})
	ob.awaitPending(t, ob.ID("after 19"))
	close(finish)
	outboxtest.Eventually(t, 15*time.Second, "P1 opens a new session", func() (bool, string) {
		n := outboxtest.Ask[int](ob.Outbox, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'`)
		return n == 2, fmt.Sprintf("%d sessions", n)
	})
	ob.probe(t, s, 5*time.Second)
	first := s.by("P2")[0].At
	for _, d := range s.by("P1") {
		if d.At.After(first.Add(notice)) {
			t.Errorf("ONE-OWNER: P1 emitted %s after P2 had begun at %s", describe([]delivery{d}), first.Format("15:04:05.000"))
		}
	}

	p2.close(t)
	if d := ob.probe(t, s, 15*time.Second); d.Reader != "P1" || d.Row.Term != 3 {
		t.Errorf("after P2 has gone the probe came to %s", describe([]delivery{d}))
	}
	ob.judge(t, s)
	p1.close(t)
	s.mustHaveOneOwner(t)
	twice := map[string]int{}
	for _, uuid := range held {
		twice[uuid] = 2
	}
	s.mustHaveCome(t, twice)
	ob.MustBeClean()
}

func ids(t *testing.T, ob *outbox, uuids []string) []int64 {
	t.Helper()
	var out []int64
	for _, uuid := range uuids {
		out = append(out, ob.ID(uuid))
	}
	return out
}
