package middleware

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// never is longer than a test: positions are saved at the end only, so what the end does not save comes twice.
const never = time.Hour

// TestFC59_RouterCloseLosesNoFinishedWork closes a Router whose handlers are at work. A Router closes the publisher of a handler
// as soon as the channel of its messages is closed, without waiting for handlers: a Subscriber that closed its channel at once
// would have their work refused.
func TestFC59_RouterCloseLosesNoFinishedWork(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	const keys = 8
	release := make(chan struct{})
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add("handled")
		<-release
		if err := msg.Context().Err(); err != nil {
			t.Errorf("the context of %s ended: %v", msg.UUID, context.Cause(msg.Context()))
		}
		return message.PassthroughHandler(msg)
	}
	var uuids, first []string
	for k := range keys {
		for i := range 3 {
			uuids = append(uuids, fmt.Sprintf("products %d/%d", k, i))
			db.Publish(fmt.Sprint(k), fmt.Sprintf("%d/%d", k, i))
		}
		first = append(first, fmt.Sprintf("products %d/0", k))
	}
	cfg := pgoutbox.SubscriberConfig{SaveInterval: never, CloseTimeout: outboxtest.Patience}
	pub := newBroker(seen)
	r := db.relay(db.subscriber(cfg), pub, handle)
	seen.times("handled", keys) // one of each key

	var closing sync.WaitGroup
	closing.Go(r.end)
	select {
	case <-pub.closed:
		t.Error("the publisher was closed with handlers at work")
	case <-time.After(300 * time.Millisecond): // nothing happens, which has no event
	}
	close(release)
	closing.Wait()
	seen.once(first...)
	if n := seen.count("handled"); n != keys {
		t.Errorf("%d messages were handled, more than the %d that were when the Router closed", n, keys)
	}
	select {
	case <-pub.closed:
	default:
		t.Error("the Router did not close its publisher")
	}

	db.relay(db.subscriber(cfg), newBroker(seen), message.PassthroughHandler)
	seen.once(uuids...)
}

// TestFC59_BridgeStopsWithoutDuplicates ends a bridge while calls of Publish run.
func TestFC59_BridgeStopsWithoutDuplicates(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	const keys = 8
	var uuids []string
	for k := range keys {
		for i := range 3 {
			uuids = append(uuids, fmt.Sprintf("orders %d/%d", k, i))
			db.Publish(fmt.Sprint(k), fmt.Sprintf("%d/%d", k, i))
		}
	}
	cfg := pgoutbox.BridgeConfig{
		ConsumerGroup: "test", BatchSize: 1, SaveInterval: never, CloseTimeout: outboxtest.Patience,
		PollInterval: 10 * time.Millisecond, RetryInterval: 50 * time.Millisecond,
	}
	ended := make(chan error, 2)
	run := func(ctx context.Context, pub message.Publisher) {
		bridge, err := pgoutbox.NewPublisherBridge(db.Pool, pub, cfg, nil)
		db.Must(err)
		go func() { ended <- bridge.Run(ctx) }() // awaited below
	}
	slow := &slowPublisher{broker: newBroker(seen), release: make(chan struct{})}
	ctx, stop := context.WithCancel(t.Context())
	run(ctx, slow)
	seen.times("called", 4)
	stop()
	close(slow.release)
	wait(t, ended)
	select {
	case <-slow.closed:
		t.Error("the bridge closed the publisher")
	default:
	}

	ctx, stop = context.WithCancel(t.Context())
	defer stop()
	run(ctx, newBroker(seen))
	seen.once(uuids...)
	stop()
	wait(t, ended)
}

func wait(t *testing.T, ended <-chan error) {
	t.Helper()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("Run returned %v", err)
		}
	case <-time.After(outboxtest.Patience):
		t.Fatal("Run does not return")
	}
}

// slowPublisher publishes when it is told to.
type slowPublisher struct {
	*broker

	release chan struct{}
}

func (p *slowPublisher) Publish(topic string, messages ...*message.Message) error {
	p.accepted.add("called")
	<-p.release
	return p.broker.Publish(topic, messages...)
}
