// Package leader tests the exported Leader, and what every lock session rests on, on a real server.
package leader

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return &outbox{outboxtest.New(t)}
}

type work = func(context.Context, pgoutbox.Lead) error

// running is a Leader that runs.
type running struct {
	*outboxtest.Running

	log *outboxtest.Log
}

// lead runs a Leader until stop, or the test's end.
func (db *outbox) lead(cfg pgoutbox.LeaderConfig, f work) *running {
	db.Helper()
	return db.leadOn(db.Pool, cfg, f)
}

func (db *outbox) leadOn(pool *pgxpool.Pool, cfg pgoutbox.LeaderConfig, f work) *running {
	db.Helper()
	if cfg.Name == "" {
		cfg.Name = "test"
	}
	if cfg.RetryInterval == 0 {
		cfg.RetryInterval = 20 * time.Millisecond
	}
	r := &running{log: outboxtest.NewLog(db)}
	leader, err := pgoutbox.NewLeader(pool, cfg, r.log)
	db.Must(err)
	r.Running = outboxtest.Run(db, func(ctx context.Context) error { return leader.Run(ctx, f) })
	return r
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
	outboxtest.Next(t, "the lead ends", l.ctx.Done())
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

func isLost(err error) bool { return errors.Is(err, pgoutbox.ErrLeadershipLost) }
