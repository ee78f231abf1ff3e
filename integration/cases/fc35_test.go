package cases_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-35: a Router is stopped while a handler works. What the handler finishes within the time it is given must count.
func TestFC35_WorkFinishedDuringShutdownCounts(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	for n := range outboxtest.Rounds(50) {
		uuid := fmt.Sprintf("m%d", n)
		handled := stopRouterInHandler(t, ob, s, uuid, 2*time.Second, func(*pgoutbox.SubscriberConfig) {})
		if handled != nil {
			t.Errorf("round %d: the context of a message whose handler had time left ended: %v", n, handled)
		}
	}
	drain(t, ob, s)
	s.mustHaveComeOnce(t)
}

// A handler that needs longer than it is given loses its context and nothing else: its message comes again.
func TestFC35_WorkThatIsNotFinishedIsRepeated(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	handled := stopRouterInHandler(t, ob, s, "m1", 3*time.Second, func(c *pgoutbox.SubscriberConfig) { c.CloseTimeout = time.Second })
	if !errors.Is(handled, pgoutbox.ErrClosed) {
		t.Errorf("the message's context ended with %v, want ErrClosed", handled)
	}
	drain(t, ob, s)
	s.mustHaveCome(t, map[string]int{"m1": 2})
}

// stopRouterInHandler stops a Router 0.5 s after a handler began that takes a while, and returns why the message's context
// had ended when the handler was done.
func stopRouterInHandler(t *testing.T, ob *outbox, s *sink, uuid string, takes time.Duration, mod config) error {
	t.Helper()
	r := ob.reader(t, mod)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: 10 * time.Second}, r.log)
	must(t, err)
	began, handled := make(chan struct{}), make(chan error, 1)
	router.AddConsumerHandler("slow", outboxtest.Topic, r.sub, func(msg *message.Message) error {
		s.Add(received("router", msg))
		close(began)
		outboxtest.Pause(t.Context(), takes)
		handled <- context.Cause(msg.Context())
		return nil
	})
	ran := make(chan error, 1)
	go func() { ran <- router.Run(t.Context()) }() // waited for below
	<-router.Running()
	ob.put(t, "key", uuid)
	select {
	case <-began:
	case <-time.After(15 * time.Second):
		t.Fatalf("%s did not reach its handler", uuid)
	}
	outboxtest.Pause(t.Context(), 500*time.Millisecond)
	must(t, router.Close())
	must(t, <-ran)
	r.close(t)
	ob.MustBeClean()
	return <-handled
}

// drain reads what is left.
func drain(t *testing.T, ob *outbox, s *sink) {
	t.Helper()
	r := ob.read(t, "drain", s, ackAll)
	ob.probe(t, s, 10*time.Second)
	ob.judge(t, s)
	r.close(t)
}
