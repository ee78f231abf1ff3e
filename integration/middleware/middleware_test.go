package middleware

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"
	"github.com/sony/gobreaker"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// forGood is the filter of the poison queue: whether an error says something about the message. What the shutdown, a lost lead or
// an open circuit breaker says is not about it. Retry returns the cause of an ended context, so context.Canceled is not enough.
func forGood(err error) bool {
	for _, passing := range []error{
		context.Canceled, pgoutbox.ErrClosed, pgoutbox.ErrLeadershipLost, gobreaker.ErrOpenState, gobreaker.ErrTooManyRequests,
	} {
		if errors.Is(err, passing) {
			return false
		}
	}
	return true
}

// keepContext gives the message its context back, which Timeout replaces by one that ends with the handler: what is published
// afterwards, to the poison queue or by the Router, would be refused.
func keepContext(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		ctx := msg.Context()
		defer msg.SetContext(ctx)
		return h(msg)
	}
}

func retry(times int) middleware.Retry {
	return middleware.Retry{
		MaxRetries: times, InitialInterval: time.Millisecond, MaxInterval: 10 * time.Millisecond, Multiplier: 2, ResetContextOnRetry: true,
	}
}

// poison is the poison queue, itself in the outbox: a message is in one or the other, whatever breaks in between.
func (db *outbox) poison(filter func(error) bool) message.HandlerMiddleware {
	db.Helper()
	queue, err := middleware.PoisonQueueWithFilter(db.Pub, "poisoned", filter)
	db.Must(err)
	return queue
}

// poisoned returns the reason of each message in the poison queue, by UUID.
func (db *outbox) poisoned() map[string]string {
	db.Helper()
	rows, err := db.Pool.Query(db.Context(), "SELECT uuid, metadata->>'reason_poisoned' FROM outbox WHERE topic = 'poisoned'")
	db.Must(err)
	defer rows.Close()
	out := map[string]string{}
	for rows.Next() {
		var uuid, reason string
		db.Must(rows.Scan(&uuid, &reason))
		out[uuid] = reason
	}
	db.Must(rows.Err())
	return out
}

var errBad = errors.New("bad")

// TestStackInTheRightOrder has every kind of trouble in one key, each followed by a message that must come after it.
func TestStackInTheRightOrder(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	products := newBroker(seen)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		if row, _ := pgoutbox.RowFromContext(msg.Context()); row.Attempt != 1 {
			t.Errorf("%s was nacked", msg.UUID)
		}
		if err := msg.Context().Err(); err != nil {
			t.Errorf("an attempt at %s begins with a context that has ended: %v", msg.UUID, err)
		}
		switch {
		case msg.UUID == "fails twice" && seen.count(msg.UUID) <= 2, msg.UUID == "fails":
			return nil, errBad
		case msg.UUID == "panics":
			panic("a defect")
		case msg.UUID == "hangs":
			<-msg.Context().Done()
			return nil, msg.Context().Err()
		}
		return []*message.Message{message.NewMessage("of "+msg.UUID, nil)}, nil
	}
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), products, handle,
		middleware.CorrelationID,
		db.poison(forGood),
		keepContext,
		retry(2).Middleware,
		middleware.NewThrottle(1000, time.Second).Middleware,
		middleware.NewCircuitBreaker(gobreaker.Settings{ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures > 20 }}).Middleware,
		middleware.Timeout(100*time.Millisecond),
		middleware.Recoverer,
	)
	first := message.NewMessageWithContext(t.Context(), "with a correlation id", nil)
	first.Metadata.Set(pgoutbox.OrderingKey, "key")
	middleware.SetCorrelationID("the correlation id", first)
	db.Must(db.Pub.Publish(outboxtest.Topic, first))
	db.Publish("key", "fails twice", "fails", "after it", "panics", "after that", "hangs", "last")

	seen.until("products of last")
	seen.once("products of with a correlation id", "products of fails twice", "products of after it", "products of after that", "products of last")
	for uuid, attempts := range map[string]int{"fails twice": 3, "fails": 3, "panics": 3, "hangs": 3, "after it": 1} {
		if n := seen.count(uuid); n != attempts {
			t.Errorf("%q was handled %d times, not %d", uuid, n, attempts)
		}
	}
	order := []string{"fails twice", "fails", "after it", "panics", "after that", "hangs", "last"}
	for i, uuid := range order[1:] {
		if seen.index(uuid) < seen.index(order[i]) {
			t.Errorf("%q came before %q", uuid, order[i])
		}
	}
	reasons := db.poisoned()
	for uuid, reason := range map[string]string{"fails": "bad", "panics": "a defect", "hangs": context.DeadlineExceeded.Error()} {
		if !strings.Contains(reasons[uuid], reason) {
			t.Errorf("%q was poisoned for %q, not for %q", uuid, reasons[uuid], reason)
		}
		delete(reasons, uuid)
	}
	for uuid := range reasons {
		t.Errorf("%q was poisoned", uuid)
	}
	if id := middleware.MessageCorrelationID(products.find("of with a correlation id")); id != "the correlation id" {
		t.Errorf("the product has the correlation id %q", id)
	}
}

// TestPoisonQueueInsideRetryNeverRetries is the order that the names suggest and that is wrong.
func TestPoisonQueueInsideRetryNeverRetries(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		if seen.count("fails once") == 1 {
			return nil, errBad
		}
		return nil, nil
	}
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, retry(5).Middleware, db.poison(forGood))
	db.Publish("key", "fails once", "probe")
	seen.until("probe")
	if _, poisoned := db.poisoned()["fails once"]; !poisoned || seen.count("fails once") != 1 {
		t.Errorf("handled %d times; this order is documented as wrong and seems to be right", seen.count("fails once"))
	}
}

// TestRecovererOutsideThePoisonQueueLeavesPanicsToTheNack: a panic passes Retry and the poison queue by.
func TestRecovererOutsideThePoisonQueueLeavesPanicsToTheNack(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		panic("a defect")
	}
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle,
		middleware.Recoverer, db.poison(forGood), retry(2).Middleware)
	db.Publish("key", "panics")
	seen.times("panics", 5)
	if len(db.poisoned()) != 0 {
		t.Error("documented as wrong and seems to be right")
	}
}

// TestFilterOfThePoisonQueueAtShutdown closes the Router while a good message is worked on, and later reads it again.
func TestFilterOfThePoisonQueueAtShutdown(t *testing.T) {
	t.Parallel()
	everything := func(error) bool { return true }
	notCanceled := func(err error) bool { return !errors.Is(err, context.Canceled) }
	tests := []struct {
		name     string
		filter   func(error) bool
		in       string // where the shutdown finds the message
		outbox   bool   // the poison queue is in the outbox, whose Publisher honours contexts; those of Kafka or NATS do not
		poisoned bool
	}{
		{"everything, in the handler", everything, "handler", false, true},
		{"everything, in the handler, into the outbox", everything, "handler", true, false},
		{"all but context.Canceled, in the handler", notCanceled, "handler", false, true}, // Retry returns another error
		{"all but context.Canceled, between retries", notCanceled, "retry", false, true},
		{"what is about the message, in the handler", forGood, "handler", false, false},
		{"what is about the message, between retries", forGood, "retry", false, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db, seen := newOutbox(t), newEvents(t)
			var again atomic.Bool
			handle := func(msg *message.Message) ([]*message.Message, error) {
				seen.add(msg.UUID)
				switch {
				case again.Load():
					return nil, nil
				case test.in == "retry":
					return nil, errBad
				}
				<-msg.Context().Done()
				return nil, msg.Context().Err()
			}
			slow := retry(3)
			slow.InitialInterval, slow.MaxInterval = outboxtest.Patience, outboxtest.Patience
			queue, err := middleware.PoisonQueueWithFilter(careless{seen}, "poisoned", test.filter)
			db.Must(err)
			if test.outbox {
				queue = db.poison(test.filter)
			}
			stack := []message.HandlerMiddleware{queue, slow.Middleware}
			cfg := pgoutbox.SubscriberConfig{CloseTimeout: 50 * time.Millisecond}
			r := db.relay(db.subscriber(cfg), newBroker(seen), handle, stack...)
			db.Publish("key", "good")
			seen.until("good")
			r.end()
			again.Store(true)
			db.relay(db.subscriber(cfg), newBroker(seen), handle, stack...)
			db.Publish("key", "probe")
			seen.until("probe")
			if poisoned := seen.count("poisoned good")+len(db.poisoned()) > 0; poisoned != test.poisoned {
				t.Errorf("poisoned: %t, not %t", poisoned, test.poisoned)
			}
			if n := seen.count("good"); n != 2 {
				t.Errorf("it was handled %d times, and must be once more after the shutdown", n)
			}
		})
	}
}

// careless is a Publisher that does not look at contexts.
type careless struct{ *events }

func (c careless) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		c.add(topic + " " + msg.UUID)
	}
	return nil
}

func (careless) Close() error { return nil }

// TestTimeoutLeavesADeadContextBehind is why keepContext is in the stack.
func TestTimeoutLeavesADeadContextBehind(t *testing.T) {
	t.Parallel()
	for _, kept := range []bool{false, true} {
		t.Run(fmt.Sprintf("kept %t", kept), func(t *testing.T) {
			t.Parallel()
			db, seen := newOutbox(t), newEvents(t)
			handle := func(msg *message.Message) ([]*message.Message, error) {
				seen.add(msg.UUID)
				return message.PassthroughHandler(msg)
			}
			var stack []message.HandlerMiddleware
			if kept {
				stack = append(stack, keepContext)
			}
			stack = append(stack, middleware.Timeout(outboxtest.Patience))
			db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, stack...)
			db.Publish("key", "passed through")
			if kept {
				seen.once("products passed through", "passed through")
				return
			}
			seen.times("passed through", 5)
			if seen.count("products passed through") != 0 {
				t.Error("documented as wrong and seems to be right")
			}
		})
	}
}

// TestCircuitBreakerKeepsEveryRow has the destination down until the breaker has opened more than once.
func TestCircuitBreakerKeepsEveryRow(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	var up atomic.Bool
	handle := func(msg *message.Message) ([]*message.Message, error) {
		if !up.Load() {
			seen.add("called while down")
			return nil, errBad
		}
		seen.add(msg.UUID)
		return nil, nil
	}
	breaker := middleware.NewCircuitBreaker(gobreaker.Settings{
		Timeout:     200 * time.Millisecond,
		ReadyToTrip: func(c gobreaker.Counts) bool { return c.ConsecutiveFailures >= 3 },
		OnStateChange: func(_ string, _, to gobreaker.State) {
			seen.add(to.String())
		},
	})
	count := func(h message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			seen.add("delivered")
			return h(msg)
		}
	}
	filter := func(err error) bool { return forGood(err) && !errors.Is(err, errBad) } // the destination's fault
	cfg := pgoutbox.SubscriberConfig{NackDelay: 10 * time.Millisecond, MaxNackDelay: 100 * time.Millisecond}
	db.relay(db.subscriber(cfg), newBroker(seen), handle, count, db.poison(filter), breaker.Middleware)
	var all []string
	for k := range 5 {
		var uuids []string
		for i := range 4 {
			uuids = append(uuids, fmt.Sprintf("key %d/%d", k, i))
		}
		db.Publish(fmt.Sprint("key ", k), uuids...)
		all = append(all, uuids...)
	}
	seen.times("open", 3)
	called, delivered := seen.count("called while down"), seen.count("delivered")
	if called > delivered/2 {
		t.Errorf("of %d deliveries %d reached the destination that is down", delivered, called)
	}
	up.Store(true)
	seen.once(all...)
	for i := range all {
		if i%4 != 0 && seen.index(all[i]) < seen.index(all[i-1]) {
			t.Errorf("%s came before %s", all[i], all[i-1])
		}
	}
	if n := len(db.poisoned()); n != 0 {
		t.Errorf("%d messages were poisoned", n)
	}
}

// TestThrottleSlowsDownAndLosesNothing.
func TestThrottleSlowsDownAndLosesNothing(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		return nil, nil
	}
	uuids := []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"}
	db.Publish("key", uuids...)
	const each = 20 * time.Millisecond
	start := time.Now()
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, middleware.NewThrottle(1, each).Middleware)
	seen.once(uuids...)
	if took := time.Since(start); took < 9*each { // the ticker may keep one tick
		t.Errorf("11 messages at one each %s took %s", each, took)
	}
}

// TestDeduplicatorLosesMessages: it knows a message from its first attempt on, whatever came of it, and any other message of
// the same payload too.
func TestDeduplicatorLosesMessages(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		if msg.UUID == "fails once" && seen.count(msg.UUID) == 1 {
			return nil, errBad
		}
		seen.add("done " + msg.UUID)
		return nil, nil
	}
	var dedup *middleware.Deduplicator // with its defaults
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, dedup.Middleware)
	for _, uuid := range []string{"fails once", "one", "other", "probe"} {
		payload := uuid
		if uuid == "other" {
			payload = "one"
		}
		msg := message.NewMessageWithContext(t.Context(), uuid, []byte(payload))
		msg.Metadata.Set(pgoutbox.OrderingKey, "key")
		db.Must(db.Pub.Publish(outboxtest.Topic, msg))
	}
	seen.until("done one", "done probe") // rows of one key: those before it are acked
	if seen.count("done fails once") != 0 || seen.count("other") != 0 {
		t.Error("documented as losing messages and seems to lose none")
	}
}

// TestInstantAckLosesMessagesAndOrder: the row is done with before the handler begins.
func TestInstantAckLosesMessagesAndOrder(t *testing.T) {
	t.Parallel()
	db, seen := newOutbox(t), newEvents(t)
	release := make(chan struct{})
	handle := func(msg *message.Message) ([]*message.Message, error) {
		seen.add(msg.UUID)
		if msg.UUID == "first" {
			<-release
			return nil, errBad
		}
		return nil, nil
	}
	r := db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, middleware.InstantAck)
	db.Publish("key", "first", "second")
	seen.until("second") // while the first of its key is not done
	close(release)
	r.end()
	db.relay(db.subscriber(pgoutbox.SubscriberConfig{}), newBroker(seen), handle, middleware.InstantAck)
	db.Publish("key", "probe")
	seen.until("probe")
	if seen.count("first") != 1 {
		t.Error("documented as losing messages and seems to lose none")
	}
}
