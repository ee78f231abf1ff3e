package badinput

import (
	"context"
	"errors"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

func TestShardsThatAreNotStoredAreRefused(t *testing.T) {
	db := newOutbox(t, "")
	four := db.group("group")
	four.Shards = 4
	if err := db.subscriber(db.Pool, four).SubscribeInitialize("t"); err != nil {
		t.Fatal(err)
	}
	db.Exec("INSERT INTO outbox_consumers (group_name, topic, shards) VALUES ('group', '', 4)") // the Leader's of this name
	db.Exec("INSERT INTO outbox_cursors (consumer_id, shard) SELECT id, generate_series(0, 3) FROM outbox_consumers WHERE topic = ''")
	other := four
	other.Shards = 8
	for what, err := range db.refusals(db.Pool, other) {
		says(t, what, err, "has 4 shards, Shards says 8")
	}
	beyond := four
	beyond.Shards, beyond.OnlyShards = 0, []int{1, 4}
	for what, err := range db.refusals(db.Pool, beyond) {
		says(t, what, err, "shard 4", "has 4")
	}
	uuids := db.put(db.Pool, "row", 9)
	db.receive(db.subscribe(db.subscriber(db.Pool, db.group("group"))), uuids) // 0: as stored
}

// The most shards there can be are one session's locks. What would exceed MaxLocks is refused, and hurts nobody who is there.
func TestMaxLocks(t *testing.T) {
	db := newOutbox(t, "")
	cfg := db.group("group")
	cfg.Shards, cfg.MaxLocks = 256, 300
	sub := db.subscriber(db.Pool, cfg)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, err := sub.Subscribe(ctx, "t")
	if err != nil {
		t.Fatal(err)
	}
	db.receive(first, db.put(db.Pool, "row", 30))
	const locks = `SELECT count(*) || ' locks of ' || count(DISTINCT pid) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	if n := db.Text(locks); n != "256 locks of 1" {
		t.Errorf("%s sessions", n)
	}
	_, err = sub.Subscribe(t.Context(), "other")
	says(t, "a second topic", err, "256", "MaxLocks (300)", "max_locks_per_transaction")
	db.receive(first, db.put(db.Pool, "more", 30))
	cancel()
	for range first { // until it closes
		t.Error("a message came after the end")
	}
	second, err := sub.Subscribe(t.Context(), "other")
	if err != nil {
		t.Fatalf("the locks of a subscription that ended still count: %v", err)
	}
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
	if _, open := <-second; open {
		t.Error("a message of a topic that has none")
	}
	db.log.MustBeQuiet(t)
}

func TestNothingBeginsAfterClose(t *testing.T) {
	db := newOutbox(t, "")
	sub := db.subscriber(db.Pool, db.group("group"))
	if err := sub.Close(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	if _, err := sub.Subscribe(t.Context(), "t"); !errors.Is(err, pgoutbox.ErrClosed) {
		t.Errorf("Subscribe returned %v", err)
	}
	if err := sub.SubscribeInitialize("t"); !errors.Is(err, pgoutbox.ErrClosed) {
		t.Errorf("SubscribeInitialize returned %v", err)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("it took %s", took)
	}
	if n := db.Text("SELECT count(*) FROM outbox_consumers"); n != "0" {
		t.Errorf("%s consumers were created", n)
	}
}
