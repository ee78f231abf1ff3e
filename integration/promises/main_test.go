// Package promises has one test for each of the ten promises of the README. Each shows its promise in small, through what users
// call, on a real server; the wide suites (torture, cases, traps, bridge, leader, writeside) go into depth.
package promises

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// patience is how long a test waits for an event before it fails; never how long it takes.
const patience = 40 * time.Second

const topic = "orders"

// outbox is a database of its own with public.outbox in it.
type outbox struct {
	*testing.T

	dsn  string
	pool *pgxpool.Pool
	pub  *pgoutbox.Publisher
}

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return openOutbox(t, pgserver.Database(t))
}

func openOutbox(t *testing.T, dsn string) *outbox {
	t.Helper()
	db := &outbox{T: t, dsn: dsn, pool: pgserver.Pool(t, dsn)}
	db.must(pgoutbox.Migrate(t.Context(), db.pool, pgoutbox.SchemaConfig{}))
	var err error
	db.pub, err = pgoutbox.NewPublisher(db.pool, pgoutbox.PublisherConfig{}, nil)
	db.must(err)
	return db
}

func (db *outbox) must(err error) {
	db.Helper()
	if err != nil {
		db.Fatal(err)
	}
}

func (db *outbox) exec(sql string, args ...any) {
	db.Helper()
	if _, err := db.pool.Exec(db.Context(), sql, args...); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
}

func (db *outbox) ask(sql string, args ...any) (answer string) {
	db.Helper()
	if err := db.pool.QueryRow(db.Context(), sql, args...).Scan(&answer); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
	return answer
}

// begin opens a transaction on a connection of its own, rolled back when the test ends.
func (db *outbox) begin(dsn string) pgx.Tx {
	db.Helper()
	conn, err := pgx.Connect(db.Context(), dsn)
	db.must(err)
	db.Cleanup(func() { conn.Close(context.Background()) })
	tx, err := conn.Begin(db.Context())
	db.must(err)
	return tx
}

// publish publishes a message in a transaction, or by itself when tx is nil.
func (db *outbox) publish(tx pgx.Tx, key, uuid string) {
	db.Helper()
	pub := message.Publisher(db.pub)
	if tx != nil {
		pub = db.pub.WithTx(tx)
	}
	db.must(pub.Publish(topic, newMessage(db.Context(), key, uuid)))
}

func newMessage(ctx context.Context, key, uuid string) *message.Message {
	msg := message.NewMessageWithContext(ctx, uuid, nil)
	if key != "" {
		msg.Metadata.Set(pgoutbox.OrderingKey, key)
	}
	return msg
}

// put inserts rows "key/1" to "key/n" for each key, the keys side by side, and returns their names.
func (db *outbox) put(keys, n int) (uuids []string) {
	db.Helper()
	db.exec(`
		INSERT INTO outbox (topic, key, uuid)
		SELECT 'orders', 'key ' || k, 'key ' || k || '/' || i
		FROM generate_series(1, $2::int) AS i, generate_series(1, $1::int) AS k
		ORDER BY i, k`, keys, n)
	for i := range n {
		for k := range keys {
			uuids = append(uuids, fmt.Sprintf("key %d/%d", k+1, i+1))
		}
	}
	return uuids
}

// eventually asks until the answer is true.
func (db *outbox) eventually(what, sql string, args ...any) {
	db.Helper()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	late := time.After(patience)
	for {
		if db.ask("SELECT coalesce(bool_and(ok), false)::text FROM ("+sql+") AS asked (ok)", args...) == "true" {
			return
		}
		select {
		case <-again.C:
		case <-late:
			db.Fatalf("never happened: %s", what)
		}
	}
}

// endLockSessions is what a crash of a reader's session looks like. It returns how many there were.
func (db *outbox) endLockSessions() string {
	db.Helper()
	return db.ask(`
		SELECT count(pg_terminate_backend(pid))::text FROM pg_stat_activity
		WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'`)
}

// delivery is one message that arrived.
type delivery struct {
	pgoutbox.Row

	uuid, reader string
	at           time.Time
}

// log is what the readers of a test received, in order.
type log struct {
	t *testing.T

	mu   sync.Mutex
	got  []delivery
	more chan struct{}
}

func newLog(t *testing.T) *log { return &log{t: t, more: make(chan struct{})} }

func (l *log) add(d delivery) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.got = append(l.got, d)
	close(l.more)
	l.more = make(chan struct{})
}

func (l *log) all() []delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.got)
}

// times is how often each message came.
func (l *log) times() map[string]int {
	times := map[string]int{}
	for _, d := range l.all() {
		times[d.uuid]++
	}
	return times
}

// wait blocks until a condition on what came holds.
func (l *log) wait(within time.Duration, what string, held func([]delivery) bool) {
	l.t.Helper()
	late := time.After(within)
	for {
		l.mu.Lock()
		ok, more, n := held(l.got), l.more, len(l.got)
		l.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-more:
		case <-late:
			l.t.Fatalf("not within %s: %s; %d deliveries", within, what, n)
		}
	}
}

// until waits for each of the messages.
func (l *log) until(uuids ...string) {
	l.t.Helper()
	l.within(patience, uuids...)
}

func (l *log) within(d time.Duration, uuids ...string) {
	l.t.Helper()
	what := fmt.Sprintf("%q and %d more come", uuids[0], len(uuids)-1)
	l.wait(d, what, func(got []delivery) bool {
		came := map[string]bool{}
		for _, d := range got {
			came[d.uuid] = true
		}
		return !slices.ContainsFunc(uuids, func(uuid string) bool { return !came[uuid] })
	})
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
	sub, err := pgoutbox.NewSubscriber(db.pool, cfg, nil)
	db.must(err)
	r := &reader{Subscriber: sub}
	db.Cleanup(r.end)
	messages, err := sub.Subscribe(context.WithoutCancel(db.Context()), topic)
	db.must(err)
	r.done.Go(func() {
		for msg := range messages {
			row, _ := pgoutbox.RowFromContext(msg.Context())
			l.add(delivery{row, msg.UUID, name, time.Now()})
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

// next receives from a channel of the test's, or fails.
func next[T any](t *testing.T, what string, from <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-from:
	case <-time.After(patience):
		t.Fatalf("never happened: %s", what)
	}
	return v
}
