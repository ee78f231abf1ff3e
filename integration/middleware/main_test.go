// Package middleware composes the Subscriber with Watermill's Router and its middlewares as a user would, shows the order that is
// right and what goes wrong in others. docs/middleware.md explains.
package middleware

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"go.uber.org/goleak"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) {
	os.Exit(pgserver.Run(m,
		// The repository of a Deduplicator has no Close.
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/message/router/middleware.(*mapExpiringKeyRepository).cleanOutLoop"),
	))
}

type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return &outbox{outboxtest.New(t)}
}

// events is what a test wrote down, in order.
type events struct {
	outboxtest.Record[string]

	t *testing.T
}

func newEvents(t *testing.T) *events { return &events{t: t} }

func (e *events) add(event string) { e.Add(event) }

// count is how often an event was written down.
func (e *events) count(event string) int { return count(e.All(), event) }

func count(all []string, event string) (n int) {
	for _, other := range all {
		if other == event {
			n++
		}
	}
	return n
}

// index is where an event was first written down, -1: nowhere.
func (e *events) index(event string) int { return slices.Index(e.All(), event) }

func (e *events) until(wanted ...string) {
	e.t.Helper()
	for _, event := range wanted {
		e.times(event, 1)
	}
}

// times waits until an event was written down n times.
func (e *events) times(event string, n int) {
	e.t.Helper()
	e.Await(e.t, outboxtest.Patience, func(all []string) (bool, string) {
		got := count(all, event)
		return got >= n, fmt.Sprintf("%q was seen %d times, not %d; seen: %q", event, got, n, all[:min(len(all), 40)])
	})
}

// once fails unless each of the events was written down once.
func (e *events) once(wanted ...string) {
	e.t.Helper()
	e.until(wanted...)
	for _, event := range wanted {
		if n := e.count(event); n != 1 {
			e.t.Errorf("%q was seen %d times", event, n)
		}
	}
}

func (db *outbox) subscriber(cfg pgoutbox.SubscriberConfig) *pgoutbox.Subscriber {
	db.Helper()
	cfg.ConsumerGroup = "test"
	cfg.PollInterval = 10 * time.Millisecond
	cfg.RetryInterval = 50 * time.Millisecond
	if cfg.NackDelay == 0 {
		cfg.NackDelay = -1
		cfg.MaxNackDelay = 20 * time.Millisecond
	}
	sub, err := pgoutbox.NewSubscriber(db.Pool, cfg, nil)
	db.Must(err)
	return sub
}

// running is a Router that runs.
type running struct {
	*message.Router

	db   *outbox
	done chan struct{}
	once sync.Once
}

// start makes a Router, and runs it when add has added its handlers.
func (db *outbox) start(add func(*message.Router)) *running {
	db.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: outboxtest.Patience}, watermill.NopLogger{})
	db.Must(err)
	add(router)
	r := &running{Router: router, db: db, done: make(chan struct{})}
	go func() { // end waits
		defer close(r.done)
		if err := router.Run(context.WithoutCancel(db.Context())); err != nil {
			db.Errorf("Router.Run returned %v", err)
		}
	}()
	db.Cleanup(r.end)
	select {
	case <-router.Running():
	case <-time.After(outboxtest.Patience):
		db.Fatal("the Router does not start")
	}
	return r
}

// end closes the Router and waits until it has.
func (r *running) end() {
	r.db.Helper()
	r.once.Do(func() {
		if err := r.Close(); err != nil {
			r.db.Errorf("Router.Close returned %v", err)
		}
	})
	select {
	case <-r.done:
	case <-time.After(outboxtest.Patience):
		r.db.Error("Router.Run does not return")
	}
}

// relay is handle behind middlewares, from the outermost to the innermost, with its products published to pub.
func (db *outbox) relay(sub message.Subscriber, pub message.Publisher, handle message.HandlerFunc, middlewares ...message.HandlerMiddleware) *running {
	db.Helper()
	return db.start(func(router *message.Router) {
		router.AddMiddleware(middlewares...)
		router.AddHandler("relay", outboxtest.Topic, sub, "products", pub, handle)
	})
}

// broker is a Publisher that writes down what it accepts. As real ones do, it accepts nothing once it is closed, and nothing
// whose context has ended.
type broker struct {
	accepted *events

	mu       sync.Mutex
	messages []*message.Message
	closed   chan struct{}
	closing  sync.Once
}

func newBroker(e *events) *broker { return &broker{accepted: e, closed: make(chan struct{})} }

var errBrokerClosed = errors.New("the publisher is closed")

func (b *broker) Publish(topic string, messages ...*message.Message) error {
	select {
	case <-b.closed:
		return errBrokerClosed
	default:
	}
	for _, msg := range messages {
		if err := msg.Context().Err(); err != nil {
			return err
		}
		b.mu.Lock()
		b.messages = append(b.messages, msg)
		b.mu.Unlock()
		b.accepted.add(topic + " " + msg.UUID)
	}
	return nil
}

func (b *broker) Close() error {
	b.closing.Do(func() { close(b.closed) })
	return nil
}

// find returns the accepted message of a UUID.
func (b *broker) find(uuid string) *message.Message {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, msg := range b.messages {
		if msg.UUID == uuid {
			return msg
		}
	}
	b.accepted.t.Fatalf("%s was not published", uuid)
	return nil
}
