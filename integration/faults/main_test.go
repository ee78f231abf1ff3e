//go:build unix

package faults

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) {
	if code, isChild := Child(); isChild {
		os.Exit(code)
	}
	os.Exit(pgserver.Run(m))
}

const (
	// patience is how long a test waits for an event before it fails; never how long it takes.
	patience = 30 * time.Second
	// slack is what a busy machine may add to a promised time.
	slack = 2 * time.Second
)

// outbox is a database of its own with public.outbox in it, and every state that a cursor of it ever had.
type outbox struct {
	*testing.T

	dsn  string
	pool *pgxpool.Pool
}

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	dsn := pgserver.Database(t)
	db := &outbox{t, dsn, pgserver.Pool(t, dsn, func(c *pgxpool.Config) { c.MaxConns = 20 })}
	if err := pgoutbox.Migrate(t.Context(), db.pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	db.exec(`
		CREATE TABLE history AS SELECT * FROM outbox_cursors WITH NO DATA;
		ALTER TABLE history ADD COLUMN n bigint GENERATED ALWAYS AS IDENTITY;
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.history VALUES (NEW.*);
			RETURN NULL;
		END $$;
		CREATE TRIGGER note AFTER UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION note()`)
	return db
}

func (db *outbox) exec(sql string, args ...any) {
	db.Helper()
	if _, err := db.pool.Exec(db.Context(), sql, args...); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
}

// ask returns the only value of a query.
func ask[T any](db *outbox, sql string, args ...any) T {
	db.Helper()
	rows, _ := db.pool.Query(db.Context(), sql, args...) // CollectExactlyOneRow tells the error
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
	return v
}

// eventually polls the database until a condition, a query for one boolean, holds, and returns when it did.
func (db *outbox) eventually(what, sql string, args ...any) time.Time {
	db.Helper()
	ctx, cancel := context.WithTimeout(db.Context(), patience)
	defer cancel()
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		var held bool
		err := db.pool.QueryRow(ctx, sql, args...).Scan(&held)
		if err == nil && held {
			return time.Now()
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			db.Fatalf("never happened: %s (%v)", what, err)
		}
	}
}

const (
	// sessions counts our lock sessions in this database.
	sessions = "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
	// locks counts the advisory locks that are held in this database.
	locks = "SELECT count(*)::int FROM pg_locks WHERE " + ofAdvisoryLocks
	// leaders lists who holds them.
	leaders = "SELECT coalesce(array_agg(DISTINCT pid), '{}') FROM pg_locks WHERE " + ofAdvisoryLocks

	ofAdvisoryLocks = "locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
	terms           = "SELECT coalesce(sum(term), 0)::bigint FROM outbox_cursors"
)

func (db *outbox) awaitSessions(n int) {
	db.Helper()
	db.eventually(fmt.Sprintf("%d lock sessions", n), "SELECT ("+sessions+") = $1", n)
}

// awaitStandby waits until a second session has tried for the locks of the first.
func (db *outbox) awaitStandby() {
	db.Helper()
	db.eventually("another session tries for the locks", `
		SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'
			AND query LIKE '%pg_try_advisory_lock%' AND pid NOT IN (SELECT pid FROM pg_locks WHERE `+ofAdvisoryLocks+`))
			AND EXISTS (SELECT FROM pg_locks WHERE `+ofAdvisoryLocks+")")
}

func (db *outbox) awaitLocks(n int) time.Time {
	db.Helper()
	return db.eventually(fmt.Sprintf("%d advisory locks", n), "SELECT ("+locks+") = $1", n)
}

// leader is the one session that holds locks.
func (db *outbox) leader() int32 {
	db.Helper()
	pids := ask[[]int32](db, leaders)
	if len(pids) != 1 {
		db.Fatalf("sessions with advisory locks: %v, want one", pids)
	}
	return pids[0]
}

// put writes n rows with as many keys.
func (db *outbox) put(n int) {
	db.Helper()
	db.exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'key ' || i, 'row ' || i FROM generate_series(1, $1::int) AS i", n)
}

// awaitSaved waits until the stored positions are past every row, with nothing pending.
func (db *outbox) awaitSaved(shards int) {
	db.Helper()
	db.eventually("all is saved", `
		SELECT NOT EXISTS (SELECT
			FROM outbox AS o
			JOIN outbox_cursors AS c ON c.shard = (hashtextextended(o.key COLLATE "C", 0) & 255) % $1
			WHERE c.pending <> '{}' OR NOT (c.after_high >= o.id OR coalesce(c.upto_high, 0) >= o.id AND c.last_id >= o.id))`, shards)
}

// cursorsNeverWentBack fails when a stored position, or a term, was ever followed by an earlier one.
func (db *outbox) cursorsNeverWentBack() {
	db.Helper()
	const back = `
		SELECT count(*)::int
		FROM (SELECT *, lag(term) OVER w AS term_before, lag(high) OVER w AS high_before, lag(batch) OVER w AS batch_before, lag(last) OVER w AS last_before
			FROM (SELECT n, consumer_id, shard, term, coalesce(upto_high, after_high) AS high, coalesce(upto_snapshot, after_snapshot)::text AS batch,
					CASE WHEN upto_snapshot IS NULL THEN 9223372036854775807 ELSE last_id END AS last
				FROM history) AS states
			WINDOW w AS (PARTITION BY consumer_id, shard ORDER BY n)) AS steps
		WHERE term < term_before OR high < high_before OR (high = high_before AND batch = batch_before AND last < last_before)`
	if n := ask[int](db, back); n > 0 {
		db.Errorf("a cursor went back %d times", n)
	}
	if ask[int](db, "SELECT count(*)::int FROM history") == 0 {
		db.Error("no state of a cursor was noted")
	}
}

// start starts a child and kills it when the test ends.
func (db *outbox) start(role Role, into *Journal) *Process {
	db.Helper()
	role.DSN = db.dsn
	p, err := Start(role, into)
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() {
		p.Kill()
		if said := p.Said(); db.Failed() {
			db.Logf("child %d said, at last:\n%s", p.PID, said[max(0, len(said)-3000):])
		}
	})
	return p
}

// wait returns the first delivery that fits.
func (db *outbox) wait(what string, j *Journal, fits func(Delivery) bool) Delivery {
	db.Helper()
	ctx, cancel := context.WithTimeout(db.Context(), patience)
	defer cancel()
	d, err := j.Wait(ctx, fits)
	if err != nil {
		db.Fatalf("never delivered: %s, after %d deliveries", what, len(j.All()))
	}
	return d
}

// waitForAll waits until every committed row was delivered, and returns all deliveries of each.
func (db *outbox) waitForAll(j *Journal) map[int64][]Delivery {
	db.Helper()
	missing := map[int64]bool{}
	rows, _ := db.pool.Query(db.Context(), "SELECT id FROM outbox")
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		db.Fatal(err)
	}
	for _, id := range ids {
		missing[id] = true
	}
	db.wait(fmt.Sprintf("all of %d rows", len(ids)), j, func(d Delivery) bool {
		delete(missing, d.ID)
		return len(missing) == 0
	})
	out := map[int64][]Delivery{}
	for _, d := range j.All() {
		out[d.ID] = append(out[d.ID], d)
	}
	return out
}

// reader is a Subscriber in this process, behind a proxy or not. It acks everything but what it was told to hold.
type reader struct {
	db   *outbox
	log  *log
	sub  *pgoutbox.Subscriber
	held chan *message.Message // rows of the key "hold"
	slow chan *message.Message // rows of keys that begin with "slow"
	got  chan *message.Message // acked
}

// dsnOf is the database's address behind a proxy.
func (db *outbox) dsnOf(p *Proxy) string {
	cfg, err := pgx.ParseConfig(db.dsn)
	if err != nil {
		db.Fatal("the server's connection string cannot be read")
	}
	return fmt.Sprintf("host=127.0.0.1 port=%d user='%s' password='%s' dbname='%s' sslmode=disable", p.Port(), cfg.User, cfg.Password, cfg.Database)
}

func (db *outbox) proxy() *Proxy {
	db.Helper()
	p, err := NewProxy(db.dsn)
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(p.Close)
	return p
}

func (db *outbox) subscriber(cfg pgoutbox.SubscriberConfig) *reader {
	db.Helper()
	if cfg.ConsumerGroup == "" {
		cfg.ConsumerGroup = group
	}
	if cfg.CloseTimeout == 0 {
		cfg.CloseTimeout = 100 * time.Millisecond
	}
	r := &reader{db: db, log: &log{}, held: make(chan *message.Message, 100), slow: make(chan *message.Message, 100), got: make(chan *message.Message, 100_000)}
	var err error
	if r.sub, err = pgoutbox.NewSubscriber(db.pool, cfg, r.log); err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() {
		if err := r.sub.Close(); err != nil {
			db.Error(err)
		}
		if db.Failed() {
			said := r.log.String()
			db.Logf("the subscriber said, at last\n%s", said[max(0, len(said)-2000):])
		}
	})
	return r
}

// read subscribes; what comes is handled until the channel closes.
func (r *reader) read(ctx context.Context) (ended <-chan struct{}, err error) {
	messages, err := r.sub.Subscribe(ctx, pgoutbox.AllTopics)
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() { // Close, at the end of the test, ends it
		defer close(done)
		for msg := range messages {
			switch row, _ := pgoutbox.RowFromContext(msg.Context()); {
			case row.Key == "hold":
				r.held <- msg
			case strings.HasPrefix(row.Key, "slow"):
				r.slow <- msg
			default:
				r.got <- msg
				msg.Ack()
			}
		}
	}()
	return done, nil
}

func (r *reader) mustRead() (ended <-chan struct{}) {
	r.db.Helper()
	ended, err := r.read(context.WithoutCancel(r.db.Context()))
	if err != nil {
		r.db.Fatal(err)
	}
	return ended
}

// next receives from a channel of the test's, or fails.
func next[T any](db *outbox, what string, from <-chan T) (v T) {
	db.Helper()
	select {
	case v = <-from:
	case <-time.After(patience):
		db.Fatalf("never happened: %s", what)
	}
	return v
}

func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func median(times []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(times))[len(times)/2]
}

// ms rounds for people.
func ms(d time.Duration) time.Duration { return d.Round(time.Millisecond) }

// log keeps what is reported.
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
