// Package leader tests the exported Leader, and what every lock session rests on, on a real server.
package leader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
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
	dsn := pgserver.Database(t)
	db := &outbox{t, dsn, pgserver.Pool(t, dsn)}
	if err := pgoutbox.Migrate(t.Context(), db.pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	return db
}

func (db *outbox) exec(sql string, args ...any) {
	db.Helper()
	if _, err := db.pool.Exec(db.Context(), sql, args...); err != nil {
		db.Fatalf("%s: %v", sql, err)
	}
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

// session is a condition on pg_stat_activity: a lock session of this database.
const session = "datname = current_database() AND application_name LIKE 'pgoutbox %'"

// noLocks fails if a lock session, or an advisory lock, is left.
func (db *outbox) noLocks() {
	db.Helper()
	db.eventually("every lock session has ended", "SELECT count(*) = 0 FROM pg_stat_activity WHERE "+session)
	if n := db.ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"); n != "0" {
		db.Errorf("%s advisory locks are left", n)
	}
}

type work = func(context.Context, pgoutbox.Lead) error

// running is a Leader that runs.
type running struct {
	db   *outbox
	log  *log
	stop context.CancelFunc
	done chan error
}

// lead runs a Leader until stop, or the test's end.
func (db *outbox) lead(cfg pgoutbox.LeaderConfig, f work) *running {
	db.Helper()
	return db.leadOn(db.pool, cfg, f)
}

func (db *outbox) leadOn(pool *pgxpool.Pool, cfg pgoutbox.LeaderConfig, f work) *running {
	db.Helper()
	if cfg.Name == "" {
		cfg.Name = "test"
	}
	if cfg.RetryInterval == 0 {
		cfg.RetryInterval = 20 * time.Millisecond
	}
	r := &running{db: db, log: &log{}, done: make(chan error, 1)}
	leader, err := pgoutbox.NewLeader(pool, cfg, r.log)
	if err != nil {
		db.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(db.Context()))
	r.stop = stop
	go func() { r.done <- leader.Run(ctx, f) }()
	db.Cleanup(func() {
		stop()
		r.end()
	})
	return r
}

// end waits until Run returns, which must be with nil.
func (r *running) end() {
	r.db.Helper()
	select {
	case err := <-r.done:
		if err != nil {
			r.db.Errorf("Run returned %v", err)
		}
		r.done <- err
	case <-time.After(patience):
		r.db.Errorf("Run does not return; the log says\n%s", r.log)
	}
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

// untilEnd is work that lasts as long as the lead does. It announces itself.
func untilEnd(leads chan<- led) work {
	return func(ctx context.Context, l pgoutbox.Lead) error {
		select {
		case leads <- led{l, ctx}:
			<-ctx.Done()
		case <-ctx.Done():
		}
		return nil
	}
}

type led struct {
	pgoutbox.Lead

	ctx context.Context
}

// cause waits for the end of a lead and returns why it ended.
func (l led) cause(t *testing.T) error {
	t.Helper()
	next(t, "the lead ends", l.ctx.Done())
	return context.Cause(l.ctx)
}

// value returns the only value of a query on the lock session as text.
func (l led) value(sql string, args ...any) (string, error) {
	rows, err := l.Query(context.WithoutCancel(l.ctx), sql, args...)
	if err != nil {
		return "", err
	}
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[any])
	return fmt.Sprint(v), err
}

func setting(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

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

// until waits for a line that contains every one of the texts, and returns it.
func (l *log) until(t *testing.T, texts ...string) string {
	t.Helper()
	late := time.After(patience)
	for {
		for line := range strings.SplitSeq(l.String(), "\n") {
			missing := ""
			for _, text := range texts {
				if !strings.Contains(line, text) {
					missing = text
				}
			}
			if missing == "" {
				return line
			}
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-late:
			t.Fatalf("the log has no line with %q:\n%s", texts, l)
		}
	}
}

func isLost(err error) bool { return errors.Is(err, pgoutbox.ErrLeadershipLost) }
