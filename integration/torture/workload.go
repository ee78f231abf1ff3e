package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"golang.org/x/sync/errgroup"
)

// Workload writes the outbox for a while. DSN names a database that has the outbox's schema and tables.sql.
type Workload struct {
	DSN      string
	Duration time.Duration
	Writers  int
	Seed     uint64

	crashes  bool // of the server are to be survived
	history  *history
	tally    tally
	lastID   atomic.Int64
	finisher finisher
}

// Run writes until Duration is over, waits for every transaction it began, prepared ones included, and returns nil. It
// survives crashes of the server that the harness causes; any other error ends it.
func (w *Workload) Run(ctx context.Context) error {
	until, cancel := context.WithTimeout(ctx, w.Duration)
	defer cancel()

	running, ctx := errgroup.WithContext(ctx)
	running.Go(func() error { return w.finisher.run(ctx) })
	running.Go(func() error {
		defer w.finisher.close()
		writing, ctx := errgroup.WithContext(ctx)
		for n := range w.Writers {
			writing.Go(func() error { return w.write(ctx, until, n) })
		}
		for _, l := range w.longOnes() {
			writing.Go(func() error { return w.keepOpen(ctx, until, l) })
		}
		return writing.Wait()
	})
	return running.Wait()
}

// write is one writer: transactions one after the other, on a connection that is opened again when the server crashed.
func (w *Workload) write(ctx, until context.Context, n int) error {
	rnd := rand.New(rand.NewPCG(w.Seed, uint64(n)))
	return w.connected(ctx, until, func(conn *pgx.Conn) error {
		for until.Err() == nil {
			t := transaction{load: w, conn: conn, plan: drawPlan(rnd)}
			if err := t.run(ctx); err != nil {
				return fmt.Errorf("transaction %+v: %w", t.plan, err)
			}
			w.tally.ran(t.plan)
			if err := pause(ctx, between(rnd, 0, 60*time.Millisecond)); err != nil {
				return err
			}
		}
		return nil
	})
}

// connected runs do with a connection, and again with a new one each time the server crashed, until until ends.
func (w *Workload) connected(ctx, until context.Context, do func(*pgx.Conn) error) error {
	for {
		err := w.once(ctx, do)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil || !w.crashes || !serverGone(err):
			return err
		case until.Err() != nil:
			return nil //nolint:nilerr // a transaction that the last crash has cut off is not tried again
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

func (w *Workload) once(ctx context.Context, do func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, w.DSN)
	if err != nil {
		return err
	}
	// A clean-up must not hang on a server that is gone, and must happen although ctx may have ended.
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // a broken connection has nothing to say in its farewell
	}()
	err = do(conn)
	if err != nil && serverGone(err) {
		w.tally.add("broken", "cut off by a crash")
	}
	return err
}

func (w *Workload) nextID() int64 { return w.lastID.Add(1) }

// serverGone tells a crash of the server, which the harness causes, from a statement that is wrong.
func serverGone(err error) bool {
	if answer, ok := errors.AsType[*pgconn.PgError](err); ok {
		class := answer.Code[:2]
		return class == "57" || class == "08"
	}
	return !errors.Is(err, pgx.ErrNoRows) && !errors.Is(err, errRolledBack)
}
