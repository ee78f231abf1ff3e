// Package universal runs Watermill's own acceptance suite, pubsub/tests, against the Subscriber and the Publisher, with no
// test of it skipped.
package universal_test

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// features of which the suite skips nothing: ExactlyOnceDelivery would skip the tests of Close.
func features() tests.Features {
	return tests.Features{
		ConsumerGroups:      true,
		ExactlyOnceDelivery: false,
		GuaranteedOrder:     true,
		Persistent:          true,
	}
}

type setup struct {
	pool *pgxpool.Pool
	key  func(topic string, msg *message.Message) string
	cfg  pgoutbox.SubscriberConfig
}

func newSetup(t *testing.T, cfg pgoutbox.SubscriberConfig) *setup {
	t.Helper()
	return newSetupOn(t, pgserver.Database(t), cfg)
}

func newSetupOn(t *testing.T, dsn string, cfg pgoutbox.SubscriberConfig) *setup {
	t.Helper()
	pool := pgserver.Pool(t, dsn, func(c *pgxpool.Config) { c.MaxConns = 30 })
	if err := pgoutbox.Migrate(context.Background(), pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	cfg.PollInterval = 25 * time.Millisecond
	cfg.RetryInterval = 100 * time.Millisecond
	cfg.NackDelay = time.Millisecond
	cfg.MaxNackDelay = 5 * time.Millisecond
	// The suite closes up to 50 Subscribers one after the other whose messages it took and never acks; each waits this long.
	cfg.CloseTimeout = 200 * time.Millisecond
	return &setup{pool: pool, cfg: cfg}
}

// pubSub is the suite's constructor. It registers the Close that the suite forgets in TestPublishSubscribeInOrder.
func (s *setup) pubSub(t *testing.T, group string) (message.Publisher, message.Subscriber) {
	pub, err := pgoutbox.NewPublisher(s.pool, pgoutbox.PublisherConfig{Key: s.key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.cfg
	cfg.ConsumerGroup = group
	sub, err := pgoutbox.NewSubscriber(s.pool, cfg, watermill.NewStdLogger(false, false))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := sub.Close(); err != nil {
			t.Error(err)
		}
	})
	return pub, sub
}

func (s *setup) run(t *testing.T, f tests.Features, oneGroup bool) {
	t.Helper()
	var groups atomic.Int64
	tests.TestPubSub(t, f,
		func(t *testing.T) (message.Publisher, message.Subscriber) {
			if oneGroup {
				return s.pubSub(t, "test")
			}
			return s.pubSub(t, "test-"+watermill.NewShortUUID()+time.Duration(groups.Add(1)).String())
		},
		func(t *testing.T, group string) (message.Publisher, message.Subscriber) { return s.pubSub(t, group) },
	)
}

func TestOneShard(t *testing.T) {
	s := newSetup(t, pgoutbox.SubscriberConfig{Shards: 1, Ordering: pgoutbox.OrderByShard})
	s.run(t, features(), true)
}

func TestKeys(t *testing.T) {
	s := newSetup(t, pgoutbox.SubscriberConfig{Shards: 16})
	s.key = func(_ string, msg *message.Message) string { return string(msg.Payload) }
	s.run(t, features(), true)
}

func TestRandomGroups(t *testing.T) {
	s := newSetup(t, pgoutbox.SubscriberConfig{Shards: 1, Ordering: pgoutbox.OrderByShard})
	f := features()
	f.NewSubscriberReceivesOldMessages = true
	s.run(t, f, false)
}
