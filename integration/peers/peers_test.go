// Package peers shows the facts of the README's comparison with watermill-sql, each of the two in the same situation.
// One after the other: an open transaction of one test would hold up watermill-sql in the others.
package peers

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	wsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

const (
	topic    = "orders"
	patience = 40 * time.Second
	while    = 2 * time.Second // how long nothing must happen to count as not happening
)

// peer is one of the two, on a database of its own.
type peer struct {
	*testing.T

	pool      *pgxpool.Pool
	pub       message.Publisher
	subscribe func() (message.Subscriber, <-chan *message.Message)
}

func newPeer(t *testing.T) *peer {
	t.Helper()
	return &peer{T: t, pool: pgserver.Pool(t, pgserver.Database(t))}
}

func (p *peer) must(err error) {
	p.Helper()
	if err != nil {
		p.Fatal(err)
	}
}

func ours(t *testing.T) *peer {
	t.Helper()
	p := newPeer(t)
	p.must(pgoutbox.Migrate(t.Context(), p.pool, pgoutbox.SchemaConfig{}))
	var err error
	p.pub, err = pgoutbox.NewPublisher(p.pool, pgoutbox.PublisherConfig{}, nil)
	p.must(err)
	p.subscribe = func() (message.Subscriber, <-chan *message.Message) {
		sub, err := pgoutbox.NewSubscriber(p.pool, pgoutbox.SubscriberConfig{
			ConsumerGroup: "test", PollInterval: 10 * time.Millisecond, RetryInterval: 50 * time.Millisecond, CloseTimeout: 100 * time.Millisecond,
		}, nil)
		p.must(err)
		return p.open(sub)
	}
	return p
}

// theirs is watermill-sql with its default schema, or its queue.
func theirs(t *testing.T, schema wsql.SchemaAdapter, offsets wsql.OffsetsAdapter) *peer {
	t.Helper()
	p := newPeer(t)
	db := wsql.BeginnerFromPgx(p.pool)
	var err error
	p.pub, err = wsql.NewPublisher(db, wsql.PublisherConfig{SchemaAdapter: schema, AutoInitializeSchema: true}, nil)
	p.must(err)
	p.subscribe = func() (message.Subscriber, <-chan *message.Message) {
		sub, err := wsql.NewSubscriber(db, wsql.SubscriberConfig{
			ConsumerGroup: group(schema), PollInterval: 10 * time.Millisecond, ResendInterval: 10 * time.Millisecond, RetryInterval: 50 * time.Millisecond,
			SchemaAdapter: schema, OffsetsAdapter: offsets, InitializeSchema: true,
		}, nil)
		p.must(err)
		return p.open(sub)
	}
	return p
}

// group: the queue has none.
func group(schema wsql.SchemaAdapter) string {
	if _, queue := schema.(wsql.PostgreSQLQueueSchema); queue {
		return ""
	}
	return "test"
}

func theirDefault(t *testing.T) *peer {
	t.Helper()
	return theirs(t, wsql.DefaultPostgreSQLSchema{}, wsql.DefaultPostgreSQLOffsetsAdapter{})
}

func (p *peer) open(sub message.Subscriber) (message.Subscriber, <-chan *message.Message) {
	p.Helper()
	var once sync.Once
	p.Cleanup(func() { once.Do(func() { _ = sub.Close() }) })
	messages, err := sub.Subscribe(context.WithoutCancel(p.Context()), topic)
	p.must(err)
	return sub, messages
}

// publish gives every message a key of its own.
func (p *peer) publish(n int) {
	p.Helper()
	for i := range n {
		msg := message.NewMessage(fmt.Sprint(i), []byte("{}"))
		msg.Metadata.Set(pgoutbox.OrderingKey, fmt.Sprint(i))
		p.must(p.pub.Publish(topic, msg))
	}
}

// next returns the next message, nil when none comes in time.
func next(from <-chan *message.Message, within time.Duration) *message.Message {
	select {
	case msg := <-from:
		return msg
	case <-time.After(within):
		return nil
	}
}

// TestOpenTransactionOfAnotherDatabase: watermill-sql reads what is older than every open transaction of the server.
func TestOpenTransactionOfAnotherDatabase(t *testing.T) {
	for name, one := range map[string]struct {
		peer   func(*testing.T) *peer
		stalls bool
	}{"watermill-pgoutbox": {ours, false}, "watermill-sql": {theirDefault, true}} {
		t.Run(name, func(t *testing.T) {
			p := one.peer(t)
			_, messages := p.subscribe()
			p.publish(1)
			first := next(messages, patience)
			if first == nil {
				t.Fatal("nothing comes")
			}
			first.Ack()
			elsewhere, err := pgx.Connect(t.Context(), pgserver.Database(t))
			p.must(err)
			defer elsewhere.Close(context.WithoutCancel(t.Context()))
			_, err = elsewhere.Exec(t.Context(), "BEGIN; CREATE TABLE anything ()")
			p.must(err)
			p.publish(1)
			msg := next(messages, while)
			if stalls := msg == nil; stalls != one.stalls {
				t.Errorf("it waits for the transaction: %t, not %t", stalls, one.stalls)
			}
			_, err = elsewhere.Exec(t.Context(), "ROLLBACK")
			p.must(err)
			if msg == nil {
				msg = next(messages, patience)
			}
			if msg == nil {
				t.Fatal("nothing comes after the transaction")
			}
			msg.Ack()
		})
	}
}

// TestTransactionWhileAHandlerRuns: watermill-sql waits for the ack within the transaction that read the message.
func TestTransactionWhileAHandlerRuns(t *testing.T) {
	for name, one := range map[string]struct {
		peer  func(*testing.T) *peer
		holds bool
	}{"watermill-pgoutbox": {ours, false}, "watermill-sql": {theirDefault, true}} {
		t.Run(name, func(t *testing.T) {
			p := one.peer(t)
			_, messages := p.subscribe()
			p.publish(1)
			msg := next(messages, patience)
			if msg == nil {
				t.Fatal("nothing comes")
			}
			defer msg.Ack()
			held := true
			for range 50 { // what is held is there whenever one looks
				var n int
				p.must(p.pool.QueryRow(t.Context(), `
					SELECT count(*) FROM pg_stat_activity
					WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL`).Scan(&n))
				held = held && n > 0
			}
			if held != one.holds {
				t.Errorf("a transaction is open while the handler runs: %t, not %t", held, one.holds)
			}
		})
	}
}

// TestMessagesInFlight: watermill-sql has one message of a topic out at a time.
func TestMessagesInFlight(t *testing.T) {
	const published = 10
	for name, one := range map[string]struct {
		peer     func(*testing.T) *peer
		inFlight int
	}{"watermill-pgoutbox": {ours, published}, "watermill-sql": {theirDefault, 1}} {
		t.Run(name, func(t *testing.T) {
			p := one.peer(t)
			_, messages := p.subscribe()
			p.publish(published)
			var out []*message.Message
			for {
				patient := patience
				if len(out) >= one.inFlight {
					patient = while
				}
				msg := next(messages, patient)
				if msg == nil {
					break
				}
				out = append(out, msg)
				if len(out) > one.inFlight {
					break
				}
			}
			if len(out) != one.inFlight {
				t.Errorf("%d messages are out, not %d", len(out), one.inFlight)
			}
			for _, msg := range out {
				msg.Ack()
			}
		})
	}
}

// TestCloseInTheMiddleOfABatch: watermill-sql's queue deletes the whole batch that it fetched, of which one message was acked.
func TestCloseInTheMiddleOfABatch(t *testing.T) {
	const published = 25
	queue := func(t *testing.T) *peer {
		t.Helper()
		return theirs(t, wsql.PostgreSQLQueueSchema{}, wsql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true})
	}
	for name, one := range map[string]struct {
		peer  func(*testing.T) *peer
		later int // delivered by the next Subscriber
	}{
		"watermill-pgoutbox":         {ours, published - 1},
		"watermill-sql":              {theirDefault, published - 1},
		"the queue of watermill-sql": {queue, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := one.peer(t)
			creates, _ := p.subscribe() // the tables, or the consumer
			p.must(creates.Close())
			p.publish(published)
			sub, messages := p.subscribe()
			first := next(messages, patience)
			if first == nil {
				t.Fatal("nothing comes")
			}
			first.Ack()
			if second := next(messages, patience); second == nil { // so the first is done with; this one is never acked
				t.Fatal("no second message comes")
			}
			p.must(sub.Close())

			_, messages = p.subscribe()
			later := 0
			for {
				patient := patience
				if later >= one.later {
					patient = while
				}
				msg := next(messages, patient)
				if msg == nil {
					break
				}
				msg.Ack()
				later++
			}
			if later != one.later {
				t.Errorf("%d of %d messages came after the first, not %d", later, published-1, one.later)
			}
		})
	}
}
