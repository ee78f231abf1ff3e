package writeside

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
	_ "github.com/lib/pq"              // the driver "postgres"
)

// hardMessages are those that one encoding or another gets wrong.
func hardMessages() []*message.Message {
	everyByte := make([]byte, 256)
	for i := range everyByte {
		everyByte[i] = byte(i)
	}
	control := make([]byte, 31)
	for i := range control {
		control[i] = byte(i + 1)
	}
	all := []*message.Message{
		{},                  // nothing at all
		{Payload: []byte{}}, // empty, not nil
		{UUID: "empty metadata", Metadata: message.Metadata{}},
		{UUID: "bytes", Payload: everyByte},
		{UUID: "hex", Payload: []byte(`\x00ff`)},
		{UUID: "json", Payload: []byte(`{"a": "\u0000"}`)},
		{UUID: "invalid UTF-8 payload", Payload: []byte("\xff\xfe\x00")},
		{UUID: "a large payload", Payload: []byte(strings.Repeat("\\\"\x00", 100_000))},
		{UUID: `{"a",NULL}`, Payload: []byte("x")},
		{UUID: "NULL"},
		{UUID: "bytes"}, // a UUID again
		{UUID: " \t\n"},
		{UUID: `\`, Metadata: message.Metadata{`\`: `\`, `"`: `"`, "": "", "NULL": "NULL", "'": "''", "$1": "$2"}},
		{UUID: "ключ 😀", Metadata: message.Metadata{"ключ": "😀", "é": "<&>\u2028", "control": string(control), "\x7f": "\u200d"}},
		{UUID: "keyed", Metadata: message.Metadata{pgoutbox.OrderingKey: "k"}},
		{UUID: "odd key", Metadata: message.Metadata{pgoutbox.OrderingKey: `{"😀",\` + "\n'"}},
		{UUID: "key NULL", Metadata: message.Metadata{pgoutbox.OrderingKey: "NULL"}},
		{UUID: "empty key", Metadata: message.Metadata{pgoutbox.OrderingKey: ""}},
	}
	return all
}

// stored is what the table must hold of msg.
func stored(topic string, msg *message.Message) row {
	want := row{Topic: topic, UUID: msg.UUID, Metadata: msg.Metadata, Payload: msg.Payload}
	if key := msg.Metadata[pgoutbox.OrderingKey]; key != "" {
		want.Key = &key
	}
	return want
}

// paths are the ways by which messages reach the table.
func paths(t *testing.T, pool *pgxpool.Pool, std map[string]*sql.DB) map[string]func(topic string, msgs ...*message.Message) error {
	t.Helper()
	pub := newPublisher(t, pool, pgoutbox.PublisherConfig{})
	all := map[string]func(string, ...*message.Message) error{
		"pool":      pub.Publish,
		"tx = pool": pub.WithTx(pool).Publish,
		"tx": func(topic string, msgs ...*message.Message) error {
			tx := begin(t, pool)
			if err := pub.WithTx(tx).Publish(topic, msgs...); err != nil {
				return err
			}
			return tx.Commit(t.Context())
		},
		"tx in the context": func(topic string, msgs ...*message.Message) error {
			tx := begin(t, pool)
			if err := pub.Publish(topic, inContext(pgoutbox.ContextWithTx(t.Context(), tx), msgs...)...); err != nil {
				return err
			}
			return tx.Commit(t.Context())
		},
		"conn": func(topic string, msgs ...*message.Message) error {
			conn, err := pool.Acquire(t.Context())
			if err != nil {
				return err
			}
			defer conn.Release()
			return pub.WithTx(conn.Conn()).Publish(topic, msgs...)
		},
	}
	for name, db := range std {
		all[name] = func(topic string, msgs ...*message.Message) error {
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			if err := pub.WithStdTx(tx).Publish(topic, msgs...); err != nil {
				return err
			}
			return tx.Commit()
		}
		all[name+" in the context"] = func(topic string, msgs ...*message.Message) error {
			tx, err := db.BeginTx(t.Context(), nil)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			if err := pub.Publish(topic, inContext(pgoutbox.ContextWithStdTx(t.Context(), tx), msgs...)...); err != nil {
				return err
			}
			return tx.Commit()
		}
	}
	return all
}

func TestFC22_HardMessagesInEveryExecModeAndDriver(t *testing.T) {
	t.Parallel()
	for name, mode := range execModes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database{outboxtest.New(t)}
			_, pool := db.writer(t, execMode(mode)) // least rights, in every mode
			std := map[string]*sql.DB{"pgx stdlib": openStd(t, "pgx", db.DSN+"&default_query_exec_mode="+name)}
			if name == "exec" {
				std["lib/pq"] = openStd(t, "postgres", db.DSN)
				std["lib/pq, binary parameters"] = openStd(t, "postgres", db.DSN+"&binary_parameters=yes")
			}
			for path, publish := range paths(t, pool, std) {
				db.Exec("TRUNCATE outbox")
				topic := `täg "😀" \ {NULL}, # ` + path
				if err := publish(topic, hardMessages()...); err != nil {
					t.Errorf("%s: %v", path, err)
					continue
				}
				rows := db.rows(t, "outbox")
				if len(rows) != len(hardMessages()) {
					t.Errorf("%s: %d rows of %d", path, len(rows), len(hardMessages()))
					continue
				}
				for i, msg := range hardMessages() {
					sameRow(t, rows[i], stored(topic, msg))
				}
			}
		})
	}
}

func TestFC57_NilMetadataAndNilPayloadAreStoredAsEmpty(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	std := openStd(t, "postgres", db.DSN)
	for _, metadata := range []message.Metadata{nil, {}, {"k": "v"}} {
		for _, payload := range [][]byte{nil, {}, {0}} {
			msg := &message.Message{UUID: fmt.Sprint(metadata == nil, payload == nil), Metadata: metadata, Payload: payload}
			if err := pub.Publish("t", msg); err != nil {
				t.Error(err)
			}
			tx, err := std.BeginTx(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			if err := pub.WithStdTx(tx).Publish("t", msg); err != nil {
				t.Error(err)
			}
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
			rows := db.rows(t, "outbox")
			for _, r := range rows[len(rows)-2:] {
				if r.Metadata == nil || len(r.Metadata) != len(metadata) || r.Payload == nil || len(r.Payload) != len(payload) {
					t.Errorf("%#v, %#v are stored as %#v, %#v", metadata, payload, r.Metadata, r.Payload)
				}
			}
		}
	}
}

func TestPublishIsOneStatementHoweverManyMessages(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	const n = 100_000
	uuids := newUUIDs(n)
	count := new(counter)
	pool := pgserver.Pool(t, db.DSN, count.trace)
	if err := newPublisher(t, pool, pgoutbox.PublisherConfig{}).Publish("pool", messages(uuids...)...); err != nil {
		t.Fatal(err)
	}
	if got := count.take(); len(got) != 1 || !strings.HasPrefix(got[0], "INSERT") {
		t.Errorf("%d statements: %.200q", len(got), got)
	}
	tx, err := openStd(t, "postgres", db.DSN).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := newPublisher(t, nil, pgoutbox.PublisherConfig{}).WithStdTx(tx).Publish("std", messages(uuids...)...); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	for _, topic := range []string{"pool", "std"} {
		got := db.Text("SELECT array_agg(uuid ORDER BY id) = $1::text[] FROM outbox WHERE topic = $2", uuids, topic)
		if got != "true" {
			t.Errorf("%s: the ids do not follow the messages", topic)
		}
		if got := db.Text("SELECT count(DISTINCT xid) FROM outbox WHERE topic = $1", topic); got != "1" {
			t.Errorf("%s: %s transactions", topic, got)
		}
	}
}

func TestPublishIsSafeForConcurrentUse(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	shared := messages("read by all of them")[0]
	var wg sync.WaitGroup
	for i := range 50 {
		wg.Go(func() {
			for range 10 {
				if err := pub.Publish("t", append(messages(fmt.Sprint(i)), shared)...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := db.Text("SELECT count(*) FROM outbox"); n != "1000" {
		t.Errorf("%s rows of 1000", n)
	}
}

func TestPublishStoresAllOrNothing(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec("ALTER TABLE outbox ADD CHECK (uuid <> 'refused')")
	err := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{}).Publish("t", messages("a", "b", "refused", "c")...)
	if sqlState(err) != "23514" {
		t.Errorf("error %v", err)
	}
	if got := db.uuids(t); got != "" {
		t.Errorf("stored %s", got)
	}
}

func TestPublishNeedsNoRightButInsert(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	_, pool := db.writer(t)
	if err := newPublisher(t, pool, pgoutbox.PublisherConfig{}).Publish("t", messages("a")...); err != nil {
		t.Error(err)
	}
}

func TestKeyFunctionFillsTheKeyColumnOnly(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{Key: func(topic string, msg *message.Message) string {
		return topic + "/" + msg.UUID
	}})
	msg := messages("a")[0]
	msg.Metadata.Set(pgoutbox.OrderingKey, "not asked for")
	if err := pub.Publish("t", msg); err != nil {
		t.Fatal(err)
	}
	r := db.rows(t, "outbox")[0]
	if r.Key == nil || *r.Key != "t/a" || r.Metadata[pgoutbox.OrderingKey] != "not asked for" {
		t.Errorf("stored %+v", r)
	}
}

func TestPublishOfMessagesWithManyContexts(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	msgs := messages("a", "b", "c")
	for _, msg := range msgs {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		msg.SetContext(ctx)
	}
	if err := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{}).Publish("t", msgs...); err != nil {
		t.Error(err)
	}
}
