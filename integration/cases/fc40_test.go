package cases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// steady begins the names of messages that must be handled in peace.
const steady = "steady "

// FC-40: polls, saves, locks and their release share one connection, and sessions follow each other quickly. Nobody may use
// the connection while another does, and what is heard late of an old session must not count against a new one.
func TestFC40_SessionIsUsedByOneAtATime(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	busy := func(c *pgoutbox.SubscriberConfig) {
		c.Shards, c.PollInterval, c.SaveInterval, c.RetryInterval = 4, time.Millisecond, time.Millisecond, 10*time.Millisecond
		c.NackDelay, c.CloseTimeout = -1, time.Second
	}
	var refuse atomic.Int64
	handle := func(ctx context.Context, d delivery) error {
		if strings.HasPrefix(d.UUID, steady) {
			outboxtest.Pause(ctx, 200*time.Millisecond)
			if err := context.Cause(ctx); err != nil {
				t.Errorf("%s: nobody touched the new session, and the lead ended: %v", d.UUID, err)
			}
			return nil
		}
		if refuse.Add(-1) >= 0 {
			return errors.New("refused")
		}
		return nil
	}
	r := newReader(t, ob.Pool, busy)
	readers, kills := []*reader{r}, 0
	for n := range outboxtest.Rounds(1000) {
		name := fmt.Sprintf("cycle %d", n)
		refuse.Store(rand.Int64N(3))
		sub := r.subscribe(t, name, s, handle)
		ob.put(t, fmt.Sprintf("key %d", n%9), name)
		s.await(t, 15*time.Second, name)
		switch rand.IntN(4) {
		case 0: // the session dies just after it took the locks
			kills += killSessions(t, ob)
			ob.probe(t, s, 15*time.Second)
			kills += killSessions(t, ob)
			ob.probe(t, s, 15*time.Second)
			ob.put(t, "", steady+name)
			s.await(t, 15*time.Second, steady+name)
			sub.end(t)
		case 1: // in the middle of it
			sub.cancel()
			kills += killSessions(t, ob)
			sub.end(t)
		case 2:
			sub.end(t)
		case 3:
			r.close(t)
			r = newReader(t, ob.Pool, busy)
			readers = append(readers, r)
		}
	}
	ob.judge(t, drained(t, ob, s))
	r.close(t)
	ob.MustBeClean()
	ends := 0
	for _, r := range readers {
		ends += len(r.log.Lines("the lock session ended"))
		for _, line := range r.log.Lines("busy") {
			t.Error(line)
		}
	}
	if ends > kills {
		t.Errorf("%d sessions were given up, and %d were killed", ends, kills)
	}
	t.Logf("%d cycles, %d kills, %d deliveries", outboxtest.Rounds(1000), kills, len(s.All()))
}

// drained reads what nacks and kills left over.
func drained(t *testing.T, ob *outbox, s *sink) *sink {
	r := ob.read(t, "drain", s, ackAll)
	ob.probe(t, s, 15*time.Second)
	r.close(t)
	return s
}

func killSessions(t *testing.T, ob *outbox) (killed int) {
	t.Helper()
	for _, pid := range ob.LockSessions() {
		if outboxtest.Ask[bool](ob.Outbox, "SELECT pg_terminate_backend($1)", pid) {
			killed++
		}
	}
	return killed
}
