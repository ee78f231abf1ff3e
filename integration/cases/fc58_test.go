package cases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-58: Subscribe, Close and cancellations in any order and at the same time.
func TestFC58_SubscribeAndCloseInAnyOrder(t *testing.T) {
	t.Parallel()
	ob := newOutbox(t)
	for n := range 50 {
		ob.put(t, fmt.Sprintf("key %d", n%5), fmt.Sprintf("m%d", n))
	}
	deadline := time.Now().Add(10 * time.Second)
	subscribed, n := 0, 0
	for ; time.Now().Before(deadline); n++ { // Close is for ever, so there is a new Subscriber each time
		r := newReader(t, ob.Pool, func(c *pgoutbox.SubscriberConfig) {
			c.Shards, c.CloseTimeout, c.RetryInterval = 4, 200*time.Millisecond, 20*time.Millisecond
		})
		if n%2 == 0 {
			must(t, r.sub.SubscribeInitialize(outboxtest.Topic)) // so that the session is open before they begin
		}
		subscribed += mix(t, r)
		mustBeClosed(t, r)
		r.mustHaveNoGoroutines(t, 5*time.Second)
	}
	ob.MustBeClean()
	ob.MustNotGoBack()
	t.Logf("%d Subscribers, %d subscriptions", n, subscribed)
	if subscribed == 0 {
		t.Error("not one subscription came about before its Subscriber was closed")
	}
}

// mix lets 20 goroutines use a Subscriber until one of them has closed it, and returns how many subscriptions there were.
func mix(t *testing.T, r *reader) (subscribed int) {
	var using sync.WaitGroup
	var mu sync.Mutex
	for range 20 {
		using.Go(func() {
			for call := range 1 + rand.IntN(4) {
				began := time.Now()
				if rand.IntN(8) < min(call, 1) || rand.IntN(100) == 0 {
					r.closeIn(t)
				} else if subscribeBriefly(t, r) {
					mu.Lock()
					subscribed++
					mu.Unlock()
				}
				if took := time.Since(began); took > r.bound+5*time.Second {
					t.Errorf("a call took %s", took)
				}
			}
		})
	}
	using.Wait()
	r.closeIn(t)
	return subscribed
}

// subscribeBriefly leaves the channel alone, or handles its messages in one of three ways, until it cancels it or somebody
// closes the Subscriber.
func subscribeBriefly(t *testing.T, r *reader) bool {
	ctx, cancel := context.WithTimeout(context.Background(), rand.N(400*time.Millisecond))
	defer cancel()
	messages, err := r.tryOpen(ctx)
	if errors.Is(err, pgoutbox.ErrClosed) || (err != nil && ctx.Err() != nil) {
		return false
	}
	if err != nil {
		t.Errorf("Subscribe: %v", err)
		return false
	}
	use := []func(*message.Message){
		func(msg *message.Message) { msg.Ack() },
		func(msg *message.Message) { msg.Nack() },
		func(*message.Message) {},
	}
	switch way := rand.IntN(4); way {
	case 3:
		<-ctx.Done() // never reads
	default:
		for msg := range messages {
			use[way](msg)
		}
	}
	return true
}

// mustBeClosed demands that everything on a closed Subscriber returns at once, and says why.
func mustBeClosed(t *testing.T, r *reader) {
	t.Helper()
	began := time.Now()
	for range 2 {
		if _, err := r.sub.Subscribe(t.Context(), outboxtest.Topic); !errors.Is(err, pgoutbox.ErrClosed) {
			t.Errorf("Subscribe after Close: %v, want ErrClosed", err)
		}
		if err := r.sub.SubscribeInitialize(outboxtest.Topic); !errors.Is(err, pgoutbox.ErrClosed) {
			t.Errorf("SubscribeInitialize after Close: %v, want ErrClosed", err)
		}
		if err := errors.Join(r.sub.Stop(), r.sub.Close()); err != nil {
			t.Errorf("Stop and Close after Close: %v", err)
		}
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("calls on a closed Subscriber took %s", took)
	}
}

func TestFC58_CloseBeforeAnythingElse(t *testing.T) {
	t.Parallel()
	ob := newOutbox(t)
	r := newReader(t, ob.Pool)
	r.close(t)
	mustBeClosed(t, r)
	ob.MustBeClean()
}

func TestFC58_ClosedPublisherRefuses(t *testing.T) {
	t.Parallel()
	ob := newOutbox(t)
	w := ob.begin(t)
	bound := ob.Pub.WithTx(w.Tx)
	must(t, ob.Pub.Close())
	must(t, ob.Pub.Close())
	for name, pub := range map[string]message.Publisher{"closed": ob.Pub, "bound before": bound, "bound after": ob.Pub.WithTx(w.Tx)} {
		if err := pub.Publish(outboxtest.Topic, message.NewMessage("m1", nil)); !errors.Is(err, pgoutbox.ErrClosed) {
			t.Errorf("%s: Publish after Close: %v, want ErrClosed", name, err)
		}
	}
	must(t, w.Commit(t.Context()))
	if n := outboxtest.Ask[int](ob.Outbox, "SELECT count(*) FROM outbox"); n != 0 {
		t.Errorf("a closed Publisher stored %d rows", n)
	}
}
