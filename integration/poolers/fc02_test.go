package poolers

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// A pooler in transaction mode would leave our locks on a server connection that it hands to others. Whoever starts behind one is
// told at once, as often as it tries, while writers go on.
func TestFC02_TransactionPoolerIsRefused(t *testing.T) {
	p := transactions(t)
	pool := p.pool(pgx.QueryExecModeCacheStatement)
	mails := hard(500)
	var writing sync.WaitGroup
	writing.Go(func() { write(t, pool, mails, 4) })
	for range 3 {
		var processes sync.WaitGroup
		for range 2 {
			processes.Go(func() { refused(t, pool) })
		}
		processes.Wait()
	}
	writing.Wait()
	p.untouched()
	if n := p.Text("SELECT count(*) FROM outbox"); n != "500" {
		t.Errorf("%s of 500 messages are stored", n)
	}
}

// In session mode nothing would be wrong, but that cannot be seen from here: the server process that answers is not the one that
// the pooler named. Somebody has to say so.
func TestFC02_SessionPoolerIsRefusedUntilItIsAllowed(t *testing.T) {
	p := sessions(t)
	refused(t, p.pool(pgx.QueryExecModeCacheStatement))
	p.untouched()
}

// refused fails unless each of the four ways in is refused with the fix.
func refused(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group"}, nil)
	if err != nil {
		t.Error(err)
		return
	}
	bridge, err := pgoutbox.NewPublisherBridge(pool, outboxtest.Nobody{T: t}, pgoutbox.BridgeConfig{ConsumerGroup: "bridge"}, nil)
	if err != nil {
		t.Error(err)
		return
	}
	leader, err := pgoutbox.NewLeader(pool, pgoutbox.LeaderConfig{Name: "leader"}, nil)
	if err != nil {
		t.Error(err)
		return
	}
	ctx, cancel := context.WithTimeout(t.Context(), outboxtest.Patience/2) // what is not refused goes on until then
	defer cancel()
	calls := map[string]func() error{
		"Subscribe": func() error {
			_, err := sub.Subscribe(ctx, "t")
			return err
		},
		"SubscribeInitialize": func() error { return sub.SubscribeInitialize("t") },
		"PublisherBridge.Run": func() error { return bridge.Run(ctx) },
		"Leader.Run": func() error {
			return leader.Run(ctx, func(context.Context, pgoutbox.Lead) error { return errors.New("a shard was led") })
		},
	}
	for name, call := range calls {
		began := time.Now()
		err := call()
		if !errors.Is(err, pgoutbox.ErrPooledConnection) {
			t.Errorf("%s returned %v", name, err)
			continue
		}
		for _, fix := range []string{"LockConn", "AllowPooler"} {
			if !strings.Contains(err.Error(), fix) {
				t.Errorf("%s returned %v, which does not name %s", name, err, fix)
			}
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("%s took %s", name, took)
		}
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
}

// With the lock session on the server itself, two processes start and stop behind the same pooler as they like. Each end is a crash
// for whoever was at work: nothing is acked by then.
func TestFC02_LockConnToTheServerSurvivesRestarts(t *testing.T) {
	p := transactions(t)
	pool := p.pool(pgx.QueryExecModeCacheStatement)
	mails := hard(500)
	var writing sync.WaitGroup
	writing.Go(func() { write(t, pool, mails, 4) })
	cfg := pgoutbox.SubscriberConfig{
		ConsumerGroup: "group", LockConn: p.DSN, RetryInterval: 50 * time.Millisecond, CloseTimeout: 50 * time.Millisecond,
	}
	for range 3 {
		var processes sync.WaitGroup
		for range 2 {
			processes.Go(func() {
				sub, err := pgoutbox.NewSubscriber(pool, cfg, nil)
				if err != nil {
					t.Error(err)
					return
				}
				messages, err := sub.Subscribe(t.Context(), "t")
				if err != nil {
					t.Error(err)
				} else {
					select { // whichever process leads; the other stands by
					case <-messages:
					case <-time.After(time.Second):
					}
				}
				if err := sub.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		processes.Wait()
		p.left()
	}
	writing.Wait()
	l := outboxtest.NewLog(t)
	cfg.CloseTimeout = 0
	sub, err := pgoutbox.NewSubscriber(pool, cfg, l)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := sub.Subscribe(t.Context(), "t")
	if err != nil {
		t.Fatal(err)
	}
	read(t, messages, mails)
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	l.MustBeQuiet(t)
	p.left()
}
