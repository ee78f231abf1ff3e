// Package health shows what makes a reader unhealthy, and that it recovers by itself.
package health

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

func subscriber(t *testing.T, db *outboxtest.Outbox, pool *pgxpool.Pool, cfg pgoutbox.SubscriberConfig) *pgoutbox.Subscriber {
	t.Helper()
	cfg.ConsumerGroup, cfg.RetryInterval = "group", 100*time.Millisecond
	sub, err := pgoutbox.NewSubscriber(pool, cfg, outboxtest.NewLog(t))
	db.Must(err)
	t.Cleanup(func() { db.Must(sub.Close()) })
	return sub
}

func subscribe(t *testing.T, sub *pgoutbox.Subscriber) <-chan *message.Message {
	t.Helper()
	messages, err := sub.Subscribe(context.WithoutCancel(t.Context()), pgoutbox.AllTopics)
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

// until waits for a health that says every text; none: healthy.
func until(t *testing.T, what string, healthy func(context.Context) error, texts ...string) {
	t.Helper()
	outboxtest.Eventually(t, outboxtest.Patience, what, func() (bool, string) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := healthy(ctx)
		if err == nil {
			return len(texts) == 0, "healthy"
		}
		for _, text := range texts {
			if !strings.Contains(err.Error(), text) {
				return false, err.Error()
			}
		}
		return len(texts) > 0, err.Error()
	})
}

func TestHealthyFollowsTheLifeOfASubscriber(t *testing.T) {
	db := outboxtest.New(t)
	sub := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{})
	db.Must(sub.Healthy(t.Context()))
	subscribe(t, sub)
	until(t, "it reads", sub.Healthy)
	db.Must(sub.Close())
	if err := sub.Healthy(t.Context()); !errors.Is(err, pgoutbox.ErrClosed) {
		t.Errorf("after Close it says %v", err)
	}
}

func TestBridgeIsHealthyWhileItRuns(t *testing.T) {
	db := outboxtest.New(t)
	bridge, err := pgoutbox.NewPublisherBridge(db.Pool, outboxtest.Nobody{T: t}, pgoutbox.BridgeConfig{ConsumerGroup: "group"}, nil)
	db.Must(err)
	until(t, "it does not run", bridge.Healthy, "not running")
	run := outboxtest.Run(t, bridge.Run)
	until(t, "it runs", bridge.Healthy)
	run.End()
	until(t, "it does not run any more", bridge.Healthy, "not running")
}

func TestUnhealthyWhileTheDatabaseIsAway(t *testing.T) {
	server, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	if server.DataDir() == "" {
		t.Skipf("%s is not ours to stop; PGOUTBOX_TEST_PROVIDER=local starts one that is", server.Provider())
	}
	db := outboxtest.In(t, server.Database(t))
	sub := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{Lease: 2 * time.Second})
	subscribe(t, sub)
	until(t, "it reads", sub.Healthy)
	db.Must(server.Stop(t.Context(), "fast"))
	until(t, "the database is away", sub.Healthy, "the lock session")
	db.Must(server.StartAgain(t.Context()))
	until(t, "the database is back", sub.Healthy)
}

func TestUnhealthyWhileNothingIsAcked(t *testing.T) {
	db := outboxtest.New(t)
	sub := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{StalledAfter: 200 * time.Millisecond})
	messages := subscribe(t, sub)
	db.Publish("key", "stuck")
	msg := outboxtest.Next(t, "the row", messages)
	until(t, "it is stuck", sub.Healthy, "none of its 1 rows was acked", "row 1")
	msg.Ack()
	until(t, "it moves", sub.Healthy)
}

func TestUnhealthyWhileAStrangerHoldsALock(t *testing.T) {
	db := outboxtest.New(t)
	first := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{Shards: 1})
	subscribe(t, first)
	db.AwaitLocks(1)
	key := db.Text("SELECT (classid::bigint << 32 | objid::bigint) FROM pg_locks WHERE " + outboxtest.IsAdvisoryLock)
	second := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{})
	subscribe(t, second)
	until(t, "a peer's lock is fine", second.Healthy)
	db.Must(first.Close())
	db.Must(second.Close())
	db.AwaitLocks(0)

	stranger, err := pgx.Connect(t.Context(), db.DSN)
	db.Must(err)
	defer func() { db.Must(stranger.Close(context.WithoutCancel(t.Context()))) }()
	for _, sql := range []string{"SET application_name = 'somebody else'", "SELECT pg_advisory_lock(" + key + ")"} {
		_, err := stranger.Exec(t.Context(), sql)
		db.Must(err)
	}
	third := subscriber(t, db, db.Pool, pgoutbox.SubscriberConfig{})
	subscribe(t, third)
	until(t, "the stranger is named", third.Healthy, "somebody else", db.Text("SELECT pid FROM pg_locks WHERE "+outboxtest.IsAdvisoryLock))
	_, err = stranger.Exec(t.Context(), "SELECT pg_advisory_unlock_all()")
	db.Must(err)
	until(t, "the stranger let go", third.Healthy)
}

func TestUnhealthyWhileRowsCannotBeRead(t *testing.T) {
	db := outboxtest.New(t)
	_, pool := db.Role()
	sub := subscriber(t, db, pool, pgoutbox.SubscriberConfig{LockConn: db.DSN})
	messages := subscribe(t, sub)
	db.Publish("key", "hidden")
	until(t, "the pool may not read", sub.Healthy, "reading consumer", "permission denied")
	db.Exec("GRANT SELECT ON outbox TO PUBLIC")
	outboxtest.Next(t, "the row", messages).Ack()
	until(t, "it may", sub.Healthy)
}
