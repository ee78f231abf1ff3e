package outboxtest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Outbox is a database of its own, and a superuser's pool on it. It is the test too, so that every method can fail it.
type Outbox struct {
	testing.TB

	DSN  string
	Pool *pgxpool.Pool
	Pub  *pgoutbox.Publisher // to public.outbox
}

// New sets public.outbox up in a database of its own on the shared server.
func New(t testing.TB, mod ...func(*pgxpool.Config)) *Outbox {
	t.Helper()
	return In(t, pgserver.Database(t), mod...)
}

// In sets public.outbox up in an empty database.
func In(t testing.TB, dsn string, mod ...func(*pgxpool.Config)) *Outbox {
	t.Helper()
	o := Open(t, dsn, mod...)
	o.Must(pgoutbox.Migrate(t.Context(), o.Pool, pgoutbox.SchemaConfig{}))
	return o
}

// Open opens a database and sets nothing up in it.
func Open(t testing.TB, dsn string, mod ...func(*pgxpool.Config)) *Outbox {
	t.Helper()
	o := &Outbox{TB: t, DSN: dsn, Pool: pgserver.Pool(t, dsn, mod...)}
	var err error
	o.Pub, err = pgoutbox.NewPublisher(o.Pool, pgoutbox.PublisherConfig{}, nil)
	o.Must(err)
	return o
}

// Within is the same outbox in a test within the test.
func (o *Outbox) Within(t testing.TB) *Outbox {
	t.Helper()
	return &Outbox{TB: t, DSN: o.DSN, Pool: o.Pool, Pub: o.Pub}
}

// Must fails the test on an error.
func (o *Outbox) Must(err error) {
	o.Helper()
	if err != nil {
		o.Fatal(err)
	}
}

// Execer is a pool, a connection or a transaction.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Exec runs a statement.
func (o *Outbox) Exec(sql string, args ...any) {
	o.Helper()
	o.ExecOn(o.Pool, sql, args...)
}

// ExecOn runs a statement on a connection or in a transaction of the test's.
func (o *Outbox) ExecOn(on Execer, sql string, args ...any) {
	o.Helper()
	if _, err := on.Exec(o.Context(), sql, args...); err != nil {
		o.Fatalf("%s: %v", sql, err)
	}
}

// Ask returns the one value that a query gives.
func Ask[V any](o *Outbox, sql string, args ...any) V {
	o.Helper()
	rows, _ := o.Pool.Query(o.Context(), sql, args...) // CollectExactlyOneRow tells the error
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[V])
	if err != nil {
		o.Fatalf("%s: %v", sql, err)
	}
	return v
}

// Text returns the one value that a query gives, as text.
func (o *Outbox) Text(sql string, args ...any) string {
	o.Helper()
	return fmt.Sprint(Ask[any](o, sql, args...))
}

// Eventually asks the database until a condition, a query for one boolean, holds, and returns when it did. An error of the query
// counts as no, so a server may be away meanwhile.
func (o *Outbox) Eventually(what, sql string, args ...any) time.Time {
	o.Helper()
	ctx, cancel := context.WithTimeout(o.Context(), Patience) // the server may be silent
	defer cancel()
	Eventually(o, Patience, what, func() (held bool, seen string) {
		err := o.Pool.QueryRow(ctx, sql, args...).Scan(&held)
		return err == nil && held, fmt.Sprint(held, " ", err)
	})
	return time.Now()
}

// Begin opens a transaction, which is rolled back when the test ends.
func (o *Outbox) Begin() pgx.Tx {
	o.Helper()
	tx, err := o.Pool.Begin(o.Context())
	o.Must(err)
	o.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(o.Context())) })
	return tx
}

// Commit commits a transaction.
func (o *Outbox) Commit(tx pgx.Tx) {
	o.Helper()
	o.Must(tx.Commit(o.Context()))
}
