package badinput

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// nowhere is a pool that no test connects.
func nowhere(t *testing.T) *pgxpool.Pool {
	t.Helper()
	return pgserver.Pool(t, "postgres://user:"+hush+"password@127.0.0.1:1/database")
}

// Whoever gets everything wrong is told everything at once.
func TestConstructorsReportEveryProblemAtOnce(t *testing.T) {
	const (
		badSchema = "pg_mine"
		dsn       = "postgres://user:" + hush + "password@host:port/database"
	)
	badTable := strings.Repeat("t", 64)
	only := []int{7, 7, -1, 300}
	_, sub := pgoutbox.NewSubscriber(nil, pgoutbox.SubscriberConfig{
		Schema: badSchema, Table: badTable, Shards: 257, OnlyShards: only, StartFrom: pgoutbox.Latest, LiveOnly: true, Ordering: -1,
		MaxInFlight: -1, Window: -1, PollInterval: -1, RetryInterval: -1, Lease: time.Millisecond, SaveInterval: -1, MaxNackDelay: -1,
		CloseTimeout: -1, LockConn: dsn, MaxLocks: -1,
	}, nil)
	says(t, "NewSubscriber", sub, "pool", "Schema", "Table", "ConsumerGroup", "Shards is 257", "shard 7 twice", "shard -1", "shard 300", "Ordering",
		"LiveOnly", "StartFrom", "MaxInFlight", "Window", "PollInterval", "RetryInterval", "Lease is 1ms", "SaveInterval", "MaxNackDelay",
		"CloseTimeout", "LockConn", "MaxLocks")

	_, bridge := pgoutbox.NewPublisherBridge(nil, nil, pgoutbox.BridgeConfig{
		Schema: badSchema, Table: badTable, Shards: -1, OnlyShards: []int{}, StartFrom: pgoutbox.StartAt(time.Now()), LiveOnly: true, Topic: "\x00",
		Lanes: -1, BatchSize: -1, Window: -1, PollInterval: -1, RetryInterval: -1, Lease: 25 * time.Hour, SaveInterval: -1, MaxNackDelay: -1,
		CloseTimeout: -1, LockConn: dsn,
	}, nil)
	says(t, "NewPublisherBridge", bridge, "pool", "publisher is nil", "Schema", "Table", "ConsumerGroup", "Shards is -1", "OnlyShards is empty",
		"LiveOnly", "Topic", "Lanes", "BatchSize", "Window", "PollInterval", "RetryInterval", "Lease is 25h", "SaveInterval", "MaxNackDelay",
		"CloseTimeout", "LockConn")

	_, leader := pgoutbox.NewLeader(nil, pgoutbox.LeaderConfig{
		Schema: badSchema, Table: badTable, Shards: 1000, OnlyShards: only, RetryInterval: -1, Lease: -1, LockConn: dsn,
	}, nil)
	says(t, "NewLeader", leader, "pool", "Name", "Schema", "Table", "Shards is 1000", "shard 300", "RetryInterval", "Lease is negative", "LockConn")

	_, pub := pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{Schema: badSchema, Table: badTable}, nil)
	says(t, "NewPublisher", pub, "Schema", "Table")
	says(t, "Migrate", pgoutbox.Migrate(t.Context(), nowhere(t), pgoutbox.SchemaConfig{Schema: badSchema, Table: badTable}), "Schema", "Table")
	_, text := pgoutbox.SchemaSQL(pgoutbox.SchemaConfig{Schema: badSchema, Table: badTable})
	says(t, "SchemaSQL", text, "Schema", "Table")
}

func TestNilIsRefusedOrFine(t *testing.T) {
	pool := nowhere(t)
	var channel *typed
	_, err := pgoutbox.NewPublisherBridge(pool, channel, pgoutbox.BridgeConfig{ConsumerGroup: "group"}, nil)
	says(t, "a bridge to a nil *Publisher", err, "publisher is nil")
	says(t, "Migrate on nil", pgoutbox.Migrate(t.Context(), nil, pgoutbox.SchemaConfig{}), "nil")
	var none *pgxpool.Pool
	says(t, "Migrate on a nil *Pool", pgoutbox.Migrate(t.Context(), none, pgoutbox.SchemaConfig{}), "nil")

	pub, err := pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := pub.Publish("t", message.NewMessage("uuid", nil)); !errors.Is(err, pgoutbox.ErrNoTransaction) {
		t.Errorf("a Publisher without a pool returned %v", err)
	}
	says(t, "Publish into a nil tx", pub.WithTx(nil).Publish("t", message.NewMessage("uuid", nil)), "nil")
	says(t, "Publish into a nil *sql.Tx", pub.WithStdTx(nil).Publish("t", message.NewMessage("uuid", nil)), "nil")
	says(t, "Publish of a nil message", pub.Publish("t", message.NewMessage("uuid", nil), nil), "message 1", "nil")
	if err := pub.Publish("t"); err != nil {
		t.Errorf("Publish of nothing returned %v", err)
	}
}

type typed struct{}

func (*typed) Publish(string, ...*message.Message) error { return nil }
func (*typed) Close() error                              { return nil }
