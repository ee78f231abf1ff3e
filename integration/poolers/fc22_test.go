package poolers

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// Whatever exec mode the pool has, ours is the one that works behind a pooler: no prepared statement is lost or met again (26000,
// 42P05), no byte changes on its way.
func TestFC22_HardMessagesPassInEveryExecMode(t *testing.T) {
	for _, way := range allowed {
		t.Run(way.name, func(t *testing.T) {
			p := way.make(t)
			dsn, pooler := way.lock(p)
			for _, mode := range execModes {
				t.Run(strings.ReplaceAll(mode.String(), " ", "_"), func(t *testing.T) {
					p := &pooled{p.Within(t), p.bouncer, p.dsn}
					if _, err := p.Pool.Exec(t.Context(), "DELETE FROM outbox"); err != nil {
						t.Fatal(err)
					}
					pool := p.pool(mode)
					if err := pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{}); err != nil {
						t.Errorf("Migrate: %v", err)
					}
					l := outboxtest.NewLog(t)
					sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{
						ConsumerGroup: fmt.Sprintf("in mode %d", mode), LockConn: dsn, AllowPooler: pooler,
					}, l)
					if err != nil {
						t.Fatal(err)
					}
					defer func() { _ = sub.Close() }()
					messages, err := sub.Subscribe(t.Context(), "t")
					if err != nil {
						t.Fatal(err)
					}
					mails := hard(200)
					var writing sync.WaitGroup
					defer writing.Wait()
					writing.Go(func() { write(t, pool, mails, 50) }) // while it is read
					read(t, messages, mails)
					if err := sub.Close(); err != nil {
						t.Error(err)
					}
					l.MustBeQuiet(t)
					p.left()
				})
			}
		})
	}
}
