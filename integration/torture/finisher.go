package torture

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// preparedSlots is how many prepared transactions may wait at once; the server must allow a few more
// (max_prepared_transactions).
const preparedSlots = 8

// finisher ends prepared transactions from a session of its own.
type finisher struct {
	load  *Workload
	slots chan struct{}
	queue chan prepared
}

// prepared is a transaction that was prepared, or may have been.
type prepared struct {
	gid      string
	messages []Message
	commit   bool
	due      time.Duration // when it is to be ended, from the start of the run
}

func newFinisher(w *Workload) finisher {
	return finisher{load: w, slots: make(chan struct{}, preparedSlots), queue: make(chan prepared, preparedSlots)}
}

// reserve takes a slot; false when all are taken. A slot that was taken must be filled by hand.
func (f *finisher) reserve() bool {
	select {
	case f.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

func (f *finisher) hand(p prepared) { f.queue <- p }

// close says that nothing more will be handed over.
func (f *finisher) close() { close(f.queue) }

// run ends what it is handed until close, and checks that nothing is left prepared.
func (f *finisher) run(ctx context.Context) error {
	for p := range f.queue {
		if err := pause(ctx, p.due-f.load.history.now()); err != nil {
			return err
		}
		if err := f.finish(ctx, p); err != nil {
			return err
		}
		<-f.slots
	}
	return f.load.connected(ctx, ctx, func(conn *pgx.Conn) error {
		var left int
		if err := conn.QueryRow(ctx, `SELECT count(*) FROM pg_prepared_xacts WHERE database = current_database()`).Scan(&left); err != nil {
			return err
		}
		if left > 0 {
			return fmt.Errorf("%d prepared transactions were left behind", left)
		}
		return nil
	})
}

// finish commits or rolls back p as often as it takes to know that it is done.
func (f *finisher) finish(ctx context.Context, p prepared) error {
	statement := "ROLLBACK PREPARED '" + p.gid + "'"
	if p.commit {
		statement = "COMMIT PREPARED '" + p.gid + "'"
	}
	return f.load.connected(ctx, ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, statement)
		if answer, ok := errors.AsType[*pgconn.PgError](err); ok && answer.Code == "42704" { // unknown: it was never prepared, or is done already
			return nil
		}
		if err == nil && p.commit {
			f.load.history.committed(p.messages)
		}
		return err
	})
}
