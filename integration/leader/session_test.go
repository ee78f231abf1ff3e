package leader

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// The lock session has the settings that its lease rests on, whatever its role, its pool and the pool's hooks say.
func TestLockSessionHasItsSettings(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	hostile := []func(*pgxpool.Config){
		outboxtest.Setting("default_transaction_isolation", "serializable"), outboxtest.Setting("default_transaction_read_only", "on"),
		outboxtest.Setting("default_transaction_deferrable", "on"), outboxtest.Setting("row_security", "on"), outboxtest.Setting("statement_timeout", "0"),
		outboxtest.Setting("lock_timeout", "0"), outboxtest.Setting("idle_session_timeout", "0"), outboxtest.Setting("synchronous_commit", "on"),
		outboxtest.Setting("application_name", "the application"), outboxtest.Setting("search_path", "pg_catalog"), outboxtest.Setting("DateStyle", "German"),
		func(c *pgxpool.Config) {
			c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, "SET idle_session_timeout = 0; SET statement_timeout = 0; SET extra_float_digits = 0")
				return err
			}
		},
	}
	pool := pgserver.Pool(t, db.DSN, hostile...)
	leads := make(chan led, 1)
	db.leadOn(pool, pgoutbox.LeaderConfig{Shards: 1, Lease: 12 * time.Second}, untilEnd(leads))
	l := outboxtest.Next(t, "a lead", leads)
	rows, err := l.Query(t.Context(), "SELECT name, setting FROM pg_settings")
	if err != nil {
		t.Fatal(err)
	}
	settings := map[string]string{}
	var name, value string
	if _, err := pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		settings[name] = value
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{
		"idle_session_timeout":                "12000", // the lease
		"statement_timeout":                   "3000",  // a quarter, and 2 s at least
		"lock_timeout":                        "1000",
		"idle_in_transaction_session_timeout": "12000",
		"default_transaction_isolation":       "read committed",
		"default_transaction_read_only":       "off",
		"default_transaction_deferrable":      "off",
		"row_security":                        "off",
		"synchronous_commit":                  "off",
		"client_connection_check_interval":    "3000",
		"transaction_timeout":                 "15000", // PostgreSQL 17
		"tcp_keepalives_idle":                 "6",
		"tcp_keepalives_interval":             "2",
		"tcp_keepalives_count":                "3",
		"tcp_user_timeout":                    "12000",
		"application_name":                    "pgoutbox test",
	}
	if _, ok := settings["transaction_timeout"]; !ok {
		delete(want, "transaction_timeout")
	}
	for _, name := range slices.Sorted(maps.Keys(want)) {
		if settings[name] != want[name] {
			t.Errorf("%s is %q, want %q", name, settings[name], want[name])
		}
	}
	if level, err := l.value("SELECT current_setting('transaction_isolation') || ', read only: ' || current_setting('transaction_read_only')"); level != "read committed, read only: off" || err != nil {
		t.Errorf("statements run in %s, %v", level, err)
	}
	if token, err := l.value("SELECT length(current_setting('pgoutbox.session')) >= 20"); token != "true" || err != nil {
		t.Errorf("the session has no token: %s, %v", token, err)
	}
}

// On a server that is not the one the rows were written on, transaction ids start anew. Whoever comes first says so, once; all
// go on. A Leader reads no rows, so it need not care.
func TestAnotherServerBeginsOneEpoch(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.foreign()
	leads := make(chan led, 1)
	db.lead(pgoutbox.LeaderConfig{Name: "leader", Shards: 1}, untilEnd(leads))
	outboxtest.Next(t, "a lead", leads)
	if n := db.Text("SELECT count(*) FROM outbox_epochs"); n != "1" {
		t.Errorf("a Leader began an epoch: %s", n)
	}
	var subs []*pgoutbox.Subscriber
	var together sync.WaitGroup
	errs := make(chan error, 8)
	for i := range 4 {
		sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: fmt.Sprintf("group %d", i)}, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = sub.Close() }()
		subs = append(subs, sub)
		together.Go(func() { errs <- sub.SubscribeInitialize(outboxtest.Topic) })
	}
	together.Wait()
	close(errs)
	for err := range errs {
		if err != nil {
			t.Error(err)
		}
	}
	epochs := db.Text("SELECT string_agg(concat_ws(' ', epoch, system_identifier, first_id), ', ' ORDER BY epoch) FROM outbox_epochs")
	here := db.Text("SELECT system_identifier FROM pg_control_system()")
	if want := "1 1 1, 2 " + here + " 1"; epochs != want {
		t.Errorf("the epochs are %s, want %s", epochs, want)
	}
	for _, sub := range subs {
		if err := sub.Close(); err != nil {
			t.Error(err)
		}
	}
}

// foreign makes the outbox that of another server.
func (db *outbox) foreign() { db.Exec("UPDATE outbox_epochs SET system_identifier = 1") }

// Somebody else's session that holds the lock of a shard is reported by its process id and name; peers are not.
func TestStrangerWithTheLockIsReported(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 8)
	first := db.lead(pgoutbox.LeaderConfig{Shards: 1}, untilEnd(leads))
	outboxtest.Next(t, "a lead", leads)
	key := db.Text("SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
	peer := db.lead(pgoutbox.LeaderConfig{}, untilEnd(leads))
	for range 8 { // often enough to be reported, were it a stranger's lock
		const tries = "SELECT coalesce(max(query_start)::text, '') FROM pg_stat_activity WHERE query LIKE '%pg_try_advisory_lock%' AND " + outboxtest.IsLockSession
		last := db.Text(tries)
		db.Eventually("the peer tries again", "SELECT ("+tries+") NOT IN ('', $1)", last)
	}
	peer.Stop()
	peer.Ended()
	first.Stop()
	first.Ended()
	if strings.Contains(peer.log.String(), "error") {
		t.Errorf("the peer says\n%s", peer.log)
	}

	stranger, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close(context.WithoutCancel(t.Context()))
	var pid int
	if err := stranger.QueryRow(t.Context(), "SELECT pg_backend_pid() FROM set_config('application_name', 'nightly job', false), pg_advisory_lock($1::bigint)", key).Scan(&pid); err != nil {
		t.Fatal(err)
	}
	r := db.lead(pgoutbox.LeaderConfig{}, untilEnd(leads))
	r.log.Until(t, "error", fmt.Sprintf("pid:%d", pid), "application_name:nightly job", "shard:0")
	if _, err := stranger.Exec(t.Context(), "SELECT pg_advisory_unlock($1::bigint)", key); err != nil {
		t.Fatal(err)
	}
	outboxtest.Next(t, "a lead when the stranger is gone", leads)
}

// Whoever holds a term that has been superseded cannot move the cursor: it loses its session over the attempt.
func TestStaleTermCannotMoveACursor(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	// Every change of a cursor, as it happened.
	db.Exec(`
		CREATE TABLE changes (n bigint GENERATED ALWAYS AS IDENTITY, term bigint, moved boolean);
		CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO changes (term, moved) VALUES (new.term,
				(new.after_high, new.after_snapshot::text, new.last_id, new.pending) IS DISTINCT FROM (old.after_high, old.after_snapshot::text, old.last_id, old.pending));
			RETURN new;
		END $$;
		CREATE TRIGGER note AFTER UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION note()`)
	log := outboxtest.NewLog(t)
	sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{
		ConsumerGroup: "test", Shards: 1, PollInterval: 5 * time.Millisecond, SaveInterval: 5 * time.Millisecond, RetryInterval: time.Second,
	}, log)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Close() }()
	messages, err := sub.Subscribe(context.WithoutCancel(t.Context()), "t")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('t', 'k', 'row')")
	msg := outboxtest.Next(t, "the row", messages)
	db.Eventually("its delivery is saved", "SELECT pending <> '{}' FROM outbox_cursors")

	db.Exec("UPDATE outbox_cursors SET term = 7")
	raised := db.Text("SELECT max(n) FROM changes")
	msg.Ack() // and now the position wants to be saved
	log.Until(t, "error", "a later term began")
	again := outboxtest.Next(t, "the row again, of the next term", messages)
	row, _ := pgoutbox.RowFromContext(again.Context())
	if again.UUID != "row" || row.Term != 8 {
		t.Errorf("%s came again in term %d", again.UUID, row.Term)
	}
	if moved := db.Text("SELECT count(*) FROM changes WHERE n > $1::text::bigint AND (term < 8 OR n = (SELECT min(n) FROM changes WHERE term = 8) AND moved)", raised); moved != "0" {
		t.Errorf("the stale term moved the cursor %s times", moved)
	}
	if n := db.Text("SELECT count(*) FROM changes WHERE term = 8"); n == "0" {
		t.Error("the changes were not noted")
	}
	again.Ack()
	db.Eventually("the new term saves", "SELECT pending = '{}' AND term = 8 FROM outbox_cursors")
}

// The context of a message that is out when its term is superseded ends with the cause.
func TestMessageOfAStaleTermEnds(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{
		ConsumerGroup: "test", Shards: 1, PollInterval: 5 * time.Millisecond, SaveInterval: 5 * time.Millisecond,
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Close() }()
	messages, err := sub.Subscribe(context.WithoutCancel(t.Context()), "t")
	if err != nil {
		t.Fatal(err)
	}
	db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('t', 'a', 'out'), ('t', 'b', 'acked')")
	out := map[string]*message.Message{}
	for len(out) < 2 {
		msg := outboxtest.Next(t, "a row", messages)
		out[msg.UUID] = msg
	}
	db.Exec("UPDATE outbox_cursors SET term = term + 1")
	out["acked"].Ack()
	outboxtest.Next(t, "the message ends", out["out"].Context().Done())
	if cause := context.Cause(out["out"].Context()); !isLost(cause) {
		t.Errorf("it ended with %v", cause)
	}
	again := map[string]bool{}
	for len(again) < 2 { // neither ack nor delivery was saved by the new term
		msg := outboxtest.Next(t, "a row again", messages)
		again[msg.UUID] = true
		msg.Ack()
	}
}
