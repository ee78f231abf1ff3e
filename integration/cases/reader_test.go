package cases_test

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// reader is a Subscriber with a pool of its own, as a process has it.
type reader struct {
	sub   *pgoutbox.Subscriber
	log   *outboxtest.Log
	bound time.Duration // of Close
	label string        // of every goroutine that it starts
}

type config = func(*pgoutbox.SubscriberConfig)

var readers atomic.Int64

// reader makes a Subscriber with the product's defaults, and closes it when the test ends.
func (ob *outbox) reader(t testing.TB, mod ...config) *reader {
	t.Helper()
	pool := pgserver.Pool(t, ob.DSN, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = "reader's pool" })
	return newReader(t, pool, mod...)
}

func newReader(t testing.TB, pool *pgxpool.Pool, mod ...config) *reader {
	t.Helper()
	cfg := pgoutbox.SubscriberConfig{ConsumerGroup: "group"}
	for _, m := range mod {
		m(&cfg)
	}
	r := &reader{log: outboxtest.NewLog(t), bound: 5*time.Second + 2*time.Second, label: fmt.Sprintf("reader %d", readers.Add(1))}
	if cfg.CloseTimeout > 0 {
		r.bound = cfg.CloseTimeout + 2*time.Second
	}
	var err error
	r.sub, err = pgoutbox.NewSubscriber(pool, cfg, r.log)
	must(t, err)
	t.Cleanup(func() { _ = r.sub.Close() })
	return r
}

// read makes a reader and subscribes with it.
func (ob *outbox) read(t testing.TB, name string, s *sink, handle handler, mod ...config) *reader {
	t.Helper()
	r := ob.reader(t, mod...)
	r.subscribe(t, name, s, handle)
	return r
}

// subscription is one channel of a reader and the goroutine that drains it.
type subscription struct {
	cancel context.CancelFunc
	ended  chan struct{} // closed: the channel is closed and every handler has returned
}

// subscribe handles each message in a goroutine of its own, as the Router does.
func (r *reader) subscribe(t testing.TB, name string, s *sink, handle handler) *subscription {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	messages := r.open(t, ctx)
	out := &subscription{cancel: cancel, ended: make(chan struct{})}
	go func() { // owned by who waits for ended; Close at the end of the test ends it in any case
		defer close(out.ended)
		var handlers sync.WaitGroup
		defer handlers.Wait()
		for msg := range messages {
			d := received(name, msg)
			s.Add(d)
			handlers.Go(func() {
				if handle(msg.Context(), d) == nil {
					msg.Ack()
				} else {
					msg.Nack()
				}
			})
		}
	}()
	return out
}

// open subscribes so that all goroutines of the library bear the reader's label.
func (r *reader) open(t testing.TB, ctx context.Context) <-chan *message.Message {
	t.Helper()
	messages, err := r.tryOpen(ctx)
	must(t, err)
	return messages
}

func (r *reader) tryOpen(ctx context.Context) (messages <-chan *message.Message, err error) {
	pprof.Do(context.Background(), pprof.Labels("reader", r.label), func(context.Context) {
		messages, err = r.sub.Subscribe(ctx, outboxtest.Topic)
	})
	return messages, err
}

func received(name string, msg *message.Message) delivery {
	row, _ := pgoutbox.RowFromContext(msg.Context())
	return delivery{
		At: time.Now(), Reader: name, UUID: msg.UUID, Row: row, Payload: bytes.Clone(msg.Payload),
		Metadata: maps.Clone(msg.Metadata), msg: msg,
	}
}

// end cancels the subscription and waits until it is over.
func (s *subscription) end(t testing.TB) {
	t.Helper()
	s.cancel()
	select {
	case <-s.ended:
	case <-time.After(10 * time.Second):
		t.Fatal("the channel was not closed after its context ended")
	}
}

// close closes the reader, within what the product promises, and demands that no goroutine is left: CLEAN.
func (r *reader) close(t testing.TB) {
	t.Helper()
	r.closeIn(t)
	r.mustHaveNoGoroutines(t, 5*time.Second)
}

// machine is what two busy processors may add to a bound of the product's.
const machine = time.Second

func (r *reader) closeIn(t testing.TB) {
	t.Helper()
	closed := make(chan error, 1)
	began := time.Now()
	go func() { closed <- r.sub.Close() }() // has no owner when it hangs, but then the test has failed
	select {
	case err := <-closed:
		if err != nil {
			t.Errorf("Close: %v", err)
		}
		if took := time.Since(began); took > r.bound+machine {
			t.Errorf("Close took %s, its bound is %s", took, r.bound)
		}
	case <-time.After(2*r.bound + 10*time.Second):
		t.Errorf("Close has not returned after %s, its bound is %s", time.Since(began), r.bound)
	}
}

// mustHaveNoGoroutines allows the driver some time to give up the sockets that were cut.
func (r *reader) mustHaveNoGoroutines(t testing.TB, within time.Duration) {
	t.Helper()
	outboxtest.Eventually(t, within, "CLEAN: goroutines of a closed reader have ended", func() (bool, string) {
		left := goroutines(r.label)
		return len(left) == 0, strings.Join(left, "\n\n")
	})
}

// goroutines returns the stacks that bear a label.
func goroutines(label string) []string {
	var dump bytes.Buffer
	_ = pprof.Lookup("goroutine").WriteTo(&dump, 1)
	var out []string
	for stack := range strings.SplitSeq(dump.String(), "\n\n") {
		if strings.Contains(stack, fmt.Sprintf(`"reader":%q`, label)) {
			out = append(out, stack)
		}
	}
	return out
}
