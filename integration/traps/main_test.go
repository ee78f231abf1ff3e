// Package traps holds, on a real server, the traps that a reader of an outbox falls into: each test sets one up, shows that it
// is real where that is cheap, and shows that no row is lost, doubled, inverted or stalled in it.
package traps

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// patience is how long a test waits for an event before it fails; never how long it takes.
const patience = 40 * time.Second

// outbox is a database of its own with public.outbox in it, and a superuser's pool on it.
type outbox struct {
	*testing.T

	dsn  string
	pool *pgxpool.Pool
}

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return migrated(t, pgserver.Database(t))
}

func migrated(t *testing.T, dsn string) *outbox {
	t.Helper()
	db := &outbox{t, dsn, pgserver.Pool(t, dsn)}
	if err := pgoutbox.Migrate(t.Context(), db.pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	return db
}

func (db *outbox) exec(sql string, args ...any) {
	db.Helper()
	db.execOn(db.pool, sql, args...)
}

type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

func (db *outbox) execOn(on execer, sql string, args ...any) {
	db.Helper()
	if _, err := on.Exec(db.Context(), sql, args...); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
}

// put inserts one keyed row for each uuid, in one statement.
func (db *outbox) put(on execer, uuids ...string) {
	db.Helper()
	db.execOn(on, "INSERT INTO outbox (topic, key, uuid) SELECT 't', 'k', uuid FROM unnest($1::text[]) AS u (uuid)", uuids)
}

// ask returns the only value of a query as text.
func (db *outbox) ask(sql string, args ...any) string {
	db.Helper()
	var v any
	if err := db.pool.QueryRow(db.Context(), sql, args...).Scan(&v); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
	return fmt.Sprint(v)
}

// number returns the only value of a query.
func (db *outbox) number(sql string, args ...any) (n int64) {
	db.Helper()
	if err := db.pool.QueryRow(db.Context(), sql, args...).Scan(&n); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
	return n
}

// eventually polls the database until a condition, a query for one boolean, holds.
func (db *outbox) eventually(what, sql string, args ...any) {
	db.Helper()
	ctx, cancel := context.WithTimeout(db.Context(), patience)
	defer cancel()
	for {
		var held bool
		err := db.pool.QueryRow(ctx, sql, args...).Scan(&held)
		if err == nil && held {
			return
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			db.Fatalf("never happened: %s (%v)", what, err)
		}
	}
}

func (db *outbox) begin() pgx.Tx {
	db.Helper()
	tx, err := db.pool.Begin(db.Context())
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(db.Context())) })
	return tx
}

func (db *outbox) commit(tx pgx.Tx) {
	db.Helper()
	if err := tx.Commit(db.Context()); err != nil {
		db.Fatal(err)
	}
}

// saved waits until the stored positions cover every row, so that nothing would come again.
func (db *outbox) saved() {
	db.Helper()
	db.eventually("every row is saved as acked", `
		SELECT NOT EXISTS (
			SELECT FROM outbox AS o
			CROSS JOIN outbox_cursors AS c
			JOIN outbox_consumers AS k ON k.id = c.consumer_id
			WHERE c.shard = o.slot % k.shards AND (c.pending <> '{}' OR NOT (
				o.id <= c.after_high AND pg_visible_in_snapshot(o.xid, c.after_snapshot)
				OR coalesce(o.id <= least(c.upto_high, c.last_id) AND pg_visible_in_snapshot(o.xid, c.upto_snapshot), false))))`)
}

// session is a condition on pg_stat_activity: the lock session of this database.
const session = "datname = current_database() AND application_name LIKE 'pgoutbox %'"

var poolNumber atomic.Int64

// newPool is a pool whose sessions can be told from all others by its name.
func (db *outbox) newPool(mod ...func(*pgxpool.Config)) (pool *pgxpool.Pool, name string) {
	db.Helper()
	name = fmt.Sprintf("reader %d", poolNumber.Add(1))
	return pgserver.Pool(db.T, db.dsn, append([]func(*pgxpool.Config){setting("application_name", name)}, mod...)...), name
}

func setting(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

// inOrder is a consumer whose deliveries come one at a time, so that a test can compare the whole sequence.
func inOrder() pgoutbox.SubscriberConfig {
	return pgoutbox.SubscriberConfig{
		ConsumerGroup: "test", Shards: 1, Ordering: pgoutbox.OrderByShard,
		PollInterval: 5 * time.Millisecond, RetryInterval: 50 * time.Millisecond, SaveInterval: 10 * time.Millisecond,
	}
}

// receiver is a Subscriber and what it delivered.
type receiver struct {
	*pgoutbox.Subscriber

	db       *outbox
	log      *log
	mu       sync.Mutex
	got      []delivery
	more     chan struct{} // closed at the next delivery
	finished chan struct{}
	ack      func(delivery) bool
	ends     int
}

type delivery struct {
	pgoutbox.Row

	uuid, id string
	msg      *message.Message
}

// receive subscribes to every topic and acks what comes, or only what ack says.
func (db *outbox) receive(pool *pgxpool.Pool, cfg pgoutbox.SubscriberConfig, ack func(delivery) bool) *receiver {
	db.Helper()
	r := &receiver{db: db, log: &log{}, more: make(chan struct{}), finished: make(chan struct{}), ack: ack}
	var err error
	if r.Subscriber, err = pgoutbox.NewSubscriber(pool, cfg, r.log); err != nil {
		db.Fatal(err)
	}
	db.Cleanup(r.close)
	messages, err := r.Subscribe(context.WithoutCancel(db.Context()), pgoutbox.AllTopics)
	if err != nil {
		db.Fatal(err)
	}
	go func() {
		defer close(r.finished)
		for msg := range messages {
			r.take(msg)
		}
	}()
	return r
}

func (r *receiver) take(msg *message.Message) {
	row, _ := pgoutbox.RowFromContext(msg.Context())
	d := delivery{row, msg.UUID, pgoutbox.MessageID(msg.Context()), msg}
	r.mu.Lock()
	r.got = append(r.got, d)
	close(r.more)
	r.more = make(chan struct{})
	r.mu.Unlock()
	if r.ack == nil || r.ack(d) {
		msg.Ack()
	}
}

func (r *receiver) close() {
	if err := r.Close(); err != nil {
		r.db.Error(err)
	}
	select {
	case <-r.finished:
	case <-time.After(patience):
		r.db.Error("the channel is still open after Close")
	}
}

func (r *receiver) deliveries() []delivery {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

// until waits for a delivery of each row.
func (r *receiver) until(uuids ...string) {
	r.db.Helper()
	late := time.After(patience)
	for {
		r.mu.Lock()
		more := r.more
		seen := map[string]bool{}
		for _, d := range r.got {
			seen[d.uuid] = true
		}
		r.mu.Unlock()
		missing := slices.DeleteFunc(slices.Clone(uuids), func(uuid string) bool { return seen[uuid] })
		if len(missing) == 0 {
			return
		}
		select {
		case <-more:
		case <-late:
			r.db.Fatalf("%d rows never came: %.200s; the log says\n%s", len(missing), strings.Join(missing, " "), r.log)
		}
	}
}

const endMark = "end "

// settle waits for two more batches, each with a row of its own: what would come twice has come by then.
func (r *receiver) settle() {
	r.db.Helper()
	for range 2 {
		r.ends++
		uuid := fmt.Sprintf("%s%d", endMark, r.ends)
		r.db.put(r.db.pool, uuid)
		r.until(uuid)
	}
}

// exactly fails unless the rows, and no others, came once each and in this order.
func (r *receiver) exactly(want ...string) {
	r.db.Helper()
	r.until(want...)
	r.settle()
	var got []string
	for _, d := range r.deliveries() {
		if !strings.HasPrefix(d.uuid, endMark) {
			got = append(got, d.uuid)
		}
	}
	if !slices.Equal(got, want) {
		r.db.Errorf("delivered %d rows %.300q, want %d rows %.300q; the log says\n%s", len(got), got, len(want), want, r.log)
	}
}

// log keeps what a reader reports.
type log struct {
	mu    sync.Mutex
	lines []string
}

func (l *log) add(level, text string, err error, fields watermill.LogFields) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%s %s: %v %v", level, text, err, fields))
}

func (l *log) Error(text string, err error, fields watermill.LogFields) {
	l.add("error", text, err, fields)
}
func (l *log) Info(text string, fields watermill.LogFields)     { l.add("info", text, nil, fields) }
func (l *log) Debug(string, watermill.LogFields)                {}
func (l *log) Trace(string, watermill.LogFields)                {}
func (l *log) With(watermill.LogFields) watermill.LoggerAdapter { return l }

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.lines, "\n")
}

// numbered returns n names: "a 1", "a 2", ….
func numbered(name string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s %d", name, i+1)
	}
	return all
}

// until waits for a line that contains text.
func (l *log) until(t *testing.T, text string) {
	t.Helper()
	late := time.After(patience)
	for !strings.Contains(l.String(), text) {
		select {
		case <-time.After(5 * time.Millisecond):
		case <-late:
			t.Fatalf("the log never said %q, but\n%s", text, l)
		}
	}
}
