// Package badinput gives the library what it should not be given: configurations, texts, rights, roles and servers that are wrong.
// Each time it says what to do, or works all the same; nothing is lost, hangs or panics.
//
// Whatever a test makes secret (payloads, metadata values, passwords) begins with [hush], which no error and no line of a log
// may contain.
package badinput

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

const hush = "hush-"

// outbox has its tables in a schema, "" for public, and a log of its own.
type outbox struct {
	*outboxtest.Outbox

	schema string
	log    *outboxtest.Log
}

func newOutbox(t *testing.T, schema string) *outbox {
	t.Helper()
	db := &outbox{outboxtest.Open(t, pgserver.Database(t)), schema, newLog(t)}
	db.Must(pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{Schema: schema}))
	return db
}

// in is the same outbox in a test within the test.
func (db *outbox) in(t *testing.T) *outbox {
	t.Helper()
	return &outbox{db.Within(t), db.schema, newLog(t)}
}

// put publishes messages full of secrets, of two keys and of none, and returns their UUIDs.
func (db *outbox) put(pool *pgxpool.Pool, prefix string, n int) []string {
	db.Helper()
	pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{Schema: db.schema}, db.log)
	if err != nil {
		db.Fatal(err)
	}
	var uuids []string
	for i := range n {
		msg := secret(fmt.Sprintf("%s %d", prefix, i))
		if i%3 > 0 {
			msg.Metadata.Set(pgoutbox.OrderingKey, fmt.Sprintf("key %d", i%3))
		}
		if err := pub.Publish("t", msg); err != nil {
			db.Fatalf("publish: %v", err)
		}
		uuids = append(uuids, msg.UUID)
	}
	return uuids
}

// secret is a message that a log must not quote.
func secret(uuid string) *message.Message {
	msg := message.NewMessage(uuid, []byte("\x00\x01\\\xff'"+hush+"payload ü"))
	msg.Metadata = message.Metadata{"name": hush + "value ü \\ \" '"}
	return msg
}

// group is a configuration with short waits.
func (db *outbox) group(name string) pgoutbox.SubscriberConfig {
	return pgoutbox.SubscriberConfig{
		Schema: db.schema, ConsumerGroup: name, RetryInterval: 20 * time.Millisecond, PollInterval: 20 * time.Millisecond,
		CloseTimeout: time.Second,
	}
}

// subscriber makes a Subscriber that is closed when the test ends.
func (db *outbox) subscriber(pool *pgxpool.Pool, cfg pgoutbox.SubscriberConfig) *pgoutbox.Subscriber {
	db.Helper()
	sub, err := pgoutbox.NewSubscriber(pool, cfg, db.log)
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() {
		if err := sub.Close(); err != nil {
			db.Error(err)
		}
	})
	return sub
}

// subscribe is Subscribe to the topic of put.
func (db *outbox) subscribe(sub *pgoutbox.Subscriber) <-chan *message.Message {
	db.Helper()
	messages, err := sub.Subscribe(db.Context(), "t")
	if err != nil {
		db.Fatal(err)
	}
	return messages
}

// receive acks messages until all of these came, unchanged.
func (db *outbox) receive(from <-chan *message.Message, uuids []string) {
	db.Helper()
	missing := map[string]bool{}
	for _, uuid := range uuids {
		missing[uuid] = true
	}
	late := time.After(outboxtest.Patience)
	for len(missing) > 0 {
		select {
		case msg, open := <-from:
			if !open {
				db.Fatalf("the channel closed with %d messages missing", len(missing))
			}
			want := secret(msg.UUID)
			if key, ok := msg.Metadata[pgoutbox.OrderingKey]; ok {
				want.Metadata.Set(pgoutbox.OrderingKey, key)
			}
			if string(msg.Payload) != string(want.Payload) || !maps.Equal(msg.Metadata, want.Metadata) {
				db.Errorf("message %q came changed", msg.UUID)
			}
			delete(missing, msg.UUID)
			msg.Ack()
		case <-late:
			db.Fatalf("%d of %d messages never came: %v; the log says\n%s", len(missing), len(uuids), slices.Sorted(maps.Keys(missing)), db.log)
		}
	}
}

// refusals are the errors of the four ways to start reading. Whatever starts is stopped.
func (db *outbox) refusals(pool *pgxpool.Pool, cfg pgoutbox.SubscriberConfig) map[string]error {
	db.Helper()
	sub := db.subscriber(pool, cfg)
	bridge, err := pgoutbox.NewPublisherBridge(pool, outboxtest.Nobody{T: db.TB}, pgoutbox.BridgeConfig{
		Schema: cfg.Schema, Table: cfg.Table, ConsumerGroup: cfg.ConsumerGroup, Topic: "t", Shards: cfg.Shards, OnlyShards: cfg.OnlyShards,
		LockConn: cfg.LockConn, CloseTimeout: cfg.CloseTimeout,
	}, db.log)
	if err != nil {
		db.Fatal(err)
	}
	leader, err := pgoutbox.NewLeader(pool, pgoutbox.LeaderConfig{
		Schema: cfg.Schema, Table: cfg.Table, Name: cfg.ConsumerGroup, Shards: cfg.Shards, OnlyShards: cfg.OnlyShards, LockConn: cfg.LockConn,
	}, db.log)
	if err != nil {
		db.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(db.Context(), outboxtest.Patience/4) // what is not refused goes on until then
	defer cancel()
	_, subscribed := sub.Subscribe(ctx, "t")
	return map[string]error{
		"Subscribe":           subscribed,
		"SubscribeInitialize": sub.SubscribeInitialize("t"),
		"PublisherBridge.Run": bridge.Run(ctx),
		"Leader.Run":          leader.Run(ctx, func(context.Context, pgoutbox.Lead) error { return nil }),
	}
}

// says fails unless an error contains the texts, names the package once and tells no secret.
func says(t *testing.T, what string, err error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s succeeds", what)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%s returned %q, which does not say %q", what, err, text)
		}
	}
	if n := strings.Count(err.Error(), "pgoutbox:"); n != 1 {
		t.Errorf("%s returned %q, which names the package %d times", what, err, n)
	}
	if strings.Contains(err.Error(), hush) {
		t.Errorf("%s returned %q, which tells a secret", what, err)
	}
}

// newLog keeps what is logged, at every level. At the end of its test it must hold no secret.
func newLog(t *testing.T) *outboxtest.Log {
	t.Helper()
	l := outboxtest.NewLog(t)
	t.Cleanup(func() { // after all that was made later is closed
		if text := l.String(); strings.Contains(text, hush) {
			t.Errorf("the log tells a secret:\n%s", text)
		}
	})
	return l
}
