//go:build unix

package cases_test

import (
	"sync"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-13: Close while a message is not acked, with a server that answers, is silent or is down.
func TestFC13_CloseEndsInTimeWithAnUnackedMessage(t *testing.T) {
	t.Parallel()
	breaks := []struct {
		name  string
		own   bool
		start func(*testing.T, *pgserver.Server) (mend func())
	}{
		{"up", false, func(*testing.T, *pgserver.Server) func() { return func() {} }},
		{"silent", true, func(t *testing.T, s *pgserver.Server) func() { return freeze(t, s) }},
		{"down", true, func(t *testing.T, s *pgserver.Server) func() {
			must(t, s.Stop(t.Context(), "immediate"))
			return func() { must(t, s.StartAgain(t.Context())) }
		}},
	}
	consumers := []struct {
		name        string
		reads, acks bool
	}{
		{"never reads", false, false},
		{"reads and never acks", true, false},
		{"acks 1 s later", true, true},
	}
	for _, b := range breaks {
		t.Run("the database is "+b.name, func(t *testing.T) {
			t.Parallel()
			var server *pgserver.Server
			if b.own {
				server = ownServer(t, nil)
			} else {
				server = pgserver.Shared(t)
			}
			for _, c := range consumers {
				t.Run("the consumer "+c.name, func(t *testing.T) {
					ob := newOutboxIn(t, server.Database(t))
					closeUnacked(t, ob, c.reads, c.acks, func() func() { return b.start(t, server) })
					restartAfterClose(t, ob, c.acks && b.name == "up")
				})
			}
		})
	}
}

// closeTimeout is the default in the full run.
func closeTimeout(c *pgoutbox.SubscriberConfig) {
	if !outboxtest.Full() {
		c.CloseTimeout = 2 * time.Second
	}
}

func closeUnacked(t *testing.T, ob *outbox, reads, acks bool, breakIt func() (mend func())) {
	s := newSink()
	r := ob.reader(t, closeTimeout)
	messages := r.open(t, t.Context())
	ob.AwaitLocks(16)
	ob.put(t, "key", "m1")
	var consumer sync.WaitGroup
	defer consumer.Wait()
	if reads {
		consumer.Go(func() {
			msg, ok := <-messages
			if !ok {
				return
			}
			s.Add(received("P1", msg))
			if acks {
				outboxtest.Pause(t.Context(), time.Second)
				msg.Ack()
			}
		})
	}
	if reads {
		s.await(t, 10*time.Second, "m1")
	} else {
		outboxtest.Eventually(t, 10*time.Second, "m1 is on its way", func() (bool, string) {
			return outboxtest.Ask[bool](ob.Outbox, "SELECT EXISTS (SELECT FROM outbox_cursors WHERE pending <> '{}')"), "not yet"
		})
	}

	mend := breakIt()
	r.closeIn(t)
	select {
	case _, ok := <-messages:
		if ok {
			t.Error("Close has returned, and the channel still has messages")
		}
	default:
		t.Error("Close has returned, and the channel is open")
	}
	mend()
	ob.Pool.Reset() // the connections it had may have died with the server
	r.mustHaveNoGoroutines(t, 20*time.Second)
	ob.MustBeClean()
}

// restartAfterClose demands m1 again, unless its ack could be stored.
func restartAfterClose(t *testing.T, ob *outbox, acked bool) {
	s := newSink()
	r := ob.read(t, "P1 again", s, ackAll)
	ob.probe(t, s, 10*time.Second)
	if acked {
		if n := len(s.of("m1")); n != 0 {
			t.Errorf("m1 was acked in time and came again %d times", n)
		}
	} else {
		s.await(t, 10*time.Second, "m1")
	}
	r.close(t)
	ob.MustBeClean()
	ob.MustNotGoBack()
}
