// Package promises has one test for each of the ten promises of the README. Each shows its promise in small, through what users
// call, on a real server; the wide suites (torture, cases, traps, bridge, leader, writeside) go into depth.
package promises

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return openOutbox(t, pgserver.Database(t))
}

func openOutbox(t *testing.T, dsn string) *outbox {
	t.Helper()
	return &outbox{outboxtest.In(t, dsn)}
}

// begin opens a transaction on a connection of its own, rolled back when the test ends.
func (db *outbox) begin(dsn string) pgx.Tx {
	db.Helper()
	conn, err := pgx.Connect(db.Context(), dsn)
	db.Must(err)
	db.Cleanup(func() { conn.Close(context.Background()) })
	tx, err := conn.Begin(db.Context())
	db.Must(err)
	return tx
}

// publish publishes a message in a transaction, or by itself when tx is nil.
func (db *outbox) publish(tx pgx.Tx, key, uuid string) {
	db.Helper()
	pub := message.Publisher(db.Pub)
	if tx != nil {
		pub = db.Pub.WithTx(tx)
	}
	db.Must(pub.Publish(outboxtest.Topic, newMessage(db.Context(), key, uuid)))
}

func newMessage(ctx context.Context, key, uuid string) *message.Message {
	msg := outboxtest.Message(key, uuid)
	msg.SetContext(ctx)
	return msg
}

// log is what the readers of a test received.
type log struct {
	outboxtest.Sink

	t *testing.T
}

func newLog(t *testing.T) *log { return &log{t: t} }

// wait blocks until a condition on what came holds.
func (l *log) wait(within time.Duration, what string, held func([]outboxtest.Delivery) bool) {
	l.t.Helper()
	l.Await(l.t, within, func(all []outboxtest.Delivery) (bool, string) {
		return held(all), fmt.Sprintf("%s; %d deliveries", what, len(all))
	})
}

// until waits for each of the messages.
func (l *log) until(uuids ...string) {
	l.t.Helper()
	l.within(outboxtest.Patience, uuids...)
}

func (l *log) within(d time.Duration, uuids ...string) {
	l.t.Helper()
	l.Until(l.t, d, uuids...)
}

// handler decides about a message: true acks it, false nacks it.
type handler func(*message.Message, pgoutbox.Row) bool

func ack(*message.Message, pgoutbox.Row) bool { return true }

// reader is a Subscriber with a goroutine for each message, as in a Router.
type reader struct {
	*pgoutbox.Subscriber

	done sync.WaitGroup
}

// read subscribes, and closes when the test ends.
func (db *outbox) read(name string, l *log, cfg pgoutbox.SubscriberConfig, handle handler) *reader {
	db.Helper()
	cfg.ConsumerGroup = "test"
	return db.subscribe(name, l, cfg, handle)
}

// group is read by a group of its own.
func (db *outbox) group(name string, l *log, cfg pgoutbox.SubscriberConfig, handle handler) *reader {
	db.Helper()
	cfg.ConsumerGroup = name
	return db.subscribe(name, l, cfg, handle)
}

func (db *outbox) subscribe(name string, l *log, cfg pgoutbox.SubscriberConfig, handle handler) *reader {
	db.Helper()
	if cfg.RetryInterval == 0 {
		cfg.RetryInterval = 50 * time.Millisecond
	}
	cfg.PollInterval = 10 * time.Millisecond
	cfg.MaxNackDelay = 20 * time.Millisecond
	cfg.NackDelay = -1
	sub, err := pgoutbox.NewSubscriber(db.Pool, cfg, nil)
	db.Must(err)
	r := &reader{Subscriber: sub}
	db.Cleanup(r.end)
	messages, err := sub.Subscribe(context.WithoutCancel(db.Context()), outboxtest.Topic)
	db.Must(err)
	r.done.Go(func() {
		for msg := range messages {
			row, _ := pgoutbox.RowFromContext(msg.Context())
			l.Add(outboxtest.Received(name, msg))
			r.done.Go(func() {
				if handle(msg, row) {
					msg.Ack()
				} else {
					msg.Nack()
				}
			})
		}
	})
	return r
}

// end closes the reader and waits for its handlers.
func (r *reader) end() {
	_ = r.Close() // it has no error to return
	r.done.Wait()
}
