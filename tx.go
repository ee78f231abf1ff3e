package pgoutbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Execer runs one statement: a pgx.Tx, a *pgx.Conn or a *pgxpool.Pool. It is used as it is and never closed, committed or
// rolled back. An implementation of your own passes args on to pgx unchanged: the first is a pgx.QueryExecMode.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

var (
	_ Execer = pgx.Tx(nil)
	_ Execer = (*pgx.Conn)(nil)
	_ Execer = (*pgxpool.Pool)(nil)
)

// ContextWithTx returns a context that makes every Publish of a message that carries it part of tx. One long-lived Publisher,
// inside a cqrs.EventBus for example, thereby writes into whatever transaction its caller is in. A transaction given
// deeper down replaces the one from further up, whichever of the two functions gave it. A nil tx makes Publish fail: to
// fall back to the pool would silently leave the transaction.
//
// The context does not extend the transaction's life, and a pgx.Tx serves one call at a time.
func ContextWithTx(ctx context.Context, tx Execer) context.Context {
	return context.WithValue(ctx, targetKey{}, target{execer: tx})
}

// ContextWithStdTx is ContextWithTx for a transaction of database/sql, and for what is built on it: GORM, sqlc, bun.
func ContextWithStdTx(ctx context.Context, tx *sql.Tx) context.Context {
	return context.WithValue(ctx, targetKey{}, target{std: tx, isStd: true})
}

type targetKey struct{}

// target is where the statement of one Publish runs.
type target struct {
	execer Execer
	std    *sql.Tx
	isStd  bool
}

// carriedTarget returns the transaction that the contexts of all messages carry; none if none of them carries one.
func carriedTarget(messages []*message.Message) (t target, carried bool, err error) {
	t, carried = messages[0].Context().Value(targetKey{}).(target)
	for i, msg := range messages[1:] {
		other, ok := msg.Context().Value(targetKey{}).(target)
		switch {
		case ok != carried:
			return target{}, false, fmt.Errorf("some of the messages carry a transaction and some do not (messages %d and %d)", i, i+1)
		case ok && !t.same(other):
			return target{}, false, fmt.Errorf("the messages carry different transactions (messages %d and %d)", i, i+1)
		}
	}
	return t, carried, nil
}

func (t target) same(other target) bool {
	if t.isStd || other.isStd {
		return t.isStd == other.isStd && t.std == other.std
	}
	a, b := reflect.ValueOf(t.execer), reflect.ValueOf(other.execer)
	if !a.IsValid() || !b.IsValid() {
		return a.IsValid() == b.IsValid()
	}
	return a.Comparable() && b.Comparable() && t.execer == other.execer // == panics on what is not comparable
}

func (t target) check() error {
	if (t.isStd && t.std == nil) || (!t.isStd && isNil(t.execer)) {
		return errors.New("the transaction is nil")
	}
	return nil
}

// isNil also recognises a nil pointer inside an interface, which would panic in its first method.
func isNil(v any) bool {
	r := reflect.ValueOf(v)
	switch r.Kind() {
	case reflect.Invalid:
		return true
	case reflect.Pointer, reflect.Func, reflect.Map, reflect.Interface, reflect.Slice, reflect.Chan:
		return r.IsNil()
	default:
		return false
	}
}

// run sends the statement. It never tries again: within a transaction that is broken, and outside one, where the first
// attempt may have been stored.
func (t target) run(ctx context.Context, statement string, rows insert) error {
	if t.isStd {
		_, err := t.std.ExecContext(ctx, statement, rows.literalArgs()...)
		return err
	}
	if pool, ok := t.execer.(*pgxpool.Pool); ok {
		return runOnPool(ctx, pool, statement, rows)
	}
	_, err := t.execer.Exec(ctx, statement, rows.arrayArgs()...)
	if err != nil && !t.isTransaction() && mayBeStored(err) {
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
	}
	return err
}

// runOnPool acquires by itself, to tell a wait for a connection that ended from a statement that was sent.
func runOnPool(ctx context.Context, pool *pgxpool.Pool, statement string, rows insert) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("acquire a connection, nothing was sent: %w", err)
	}
	defer conn.Release()
	_, err = conn.Exec(ctx, statement, rows.arrayArgs()...)
	if err != nil && mayBeStored(err) {
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
	}
	return err
}

// isTransaction: only there is an answer that got lost no riddle, since nothing is stored before the commit. A *pgx.Conn in
// a transaction begun by hand looks like one that is not; the doubt is harmless.
func (t target) isTransaction() bool {
	_, ok := t.execer.(interface{ Commit(context.Context) error })
	return t.isStd || ok
}
