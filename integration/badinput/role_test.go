package badinput

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Settings that a role, a database or a pool may bring along change nothing of what is written or read.
func TestSettingsOfARoleChangeNothing(t *testing.T) {
	db := newOutbox(t, "")
	db.Exec(shadows)
	tests := []struct {
		name     string
		settings map[string]string
		readOnly bool // for the reader alone
		noisy    bool // errors may be logged on the way
	}{
		{name: "serializable", settings: map[string]string{"default_transaction_isolation": "serializable"}},
		{name: "repeatable read", settings: map[string]string{"default_transaction_isolation": "repeatable read"}},
		{name: "deferrable", settings: map[string]string{
			"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on",
		}},
		{name: "read-only", settings: map[string]string{"default_transaction_read_only": "on"}, readOnly: true},
		{name: "read-only, serializable and deferrable", settings: map[string]string{
			"default_transaction_read_only": "on", "default_transaction_isolation": "serializable", "default_transaction_deferrable": "on",
		}, readOnly: true},
		{name: "a short statement_timeout", settings: map[string]string{"statement_timeout": "50ms"}, readOnly: true, noisy: true},
		{name: "a short lock_timeout", settings: map[string]string{"lock_timeout": "1ms"}},
		{name: "a short idle_in_transaction_session_timeout", settings: map[string]string{"idle_in_transaction_session_timeout": "1ms"}},
		{name: "a short idle_session_timeout", settings: map[string]string{"idle_session_timeout": "500ms"}, readOnly: true, noisy: true},
		{name: "row_security off", settings: map[string]string{"row_security": "off"}},
		{name: "no search_path", settings: map[string]string{"search_path": ""}},
		{name: "a search_path of shadows", settings: map[string]string{"search_path": "shadows, public"}},
		{name: "a search_path of shadows before the catalogs", settings: map[string]string{"search_path": "shadows, pg_catalog"}},
		{name: "another zone", settings: map[string]string{"TimeZone": "Pacific/Chatham"}},
		{name: "a zone with a daylight saving time of half an hour", settings: map[string]string{"TimeZone": "Australia/Lord_Howe"}},
		{name: "German dates", settings: map[string]string{"DateStyle": "German, DMY", "IntervalStyle": "sql_standard"}},
		{name: "SQL dates", settings: map[string]string{"DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601"}},
		{name: "few digits", settings: map[string]string{"extra_float_digits": "-15"}},
		{name: "bytea as escapes", settings: map[string]string{"bytea_output": "escape"}},
		{name: "strings of another standard", settings: map[string]string{
			"standard_conforming_strings": "off", "backslash_quote": "on", "escape_string_warning": "off",
		}},
		{name: "a reader of another encoding", settings: map[string]string{"client_encoding": "LATIN1"}, readOnly: true},
		{name: "no NULL in arrays", settings: map[string]string{"array_nulls": "off"}},
		{name: "NULL equals NULL", settings: map[string]string{"transform_null_equals": "on"}},
		{name: "no plans by index", settings: map[string]string{
			"enable_indexscan": "off", "enable_indexonlyscan": "off", "enable_nestloop": "off", "enable_sort": "off",
		}},
		{name: "generic plans", settings: map[string]string{"plan_cache_mode": "force_generic_plan", "jit_above_cost": "0"}},
		{name: "nothing synchronous", settings: map[string]string{"synchronous_commit": "off"}},
	}
	for i, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			db := db.in(t)
			db.Exec("TRUNCATE outbox RESTART IDENTITY CASCADE")
			pool := pgserver.Pool(t, db.DSN, func(c *pgxpool.Config) {
				maps.Copy(c.ConnConfig.RuntimeParams, tt.settings)
			})
			writer := pool
			if tt.readOnly {
				writer = db.Pool
			}
			uuids := db.put(writer, "before", 10)
			cfg := db.group(fmt.Sprintf("group %d", i))
			cfg.Shards = 4
			sub := db.subscriber(pool, cfg)
			messages := db.subscribe(sub)
			db.receive(messages, uuids)
			db.receive(messages, db.put(writer, "after", 10))
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
			if n := db.Text(behind, cfg.ConsumerGroup); n != "0" && !tt.noisy {
				t.Errorf("%s rows would be delivered again", n)
			}
			if !tt.noisy {
				db.log.MustBeQuiet(t)
			}
		})
	}
	for _, table := range []string{"outbox", "outbox_consumers", "outbox_cursors", "outbox_epochs"} {
		if n := db.Text("SELECT count(*) FROM shadows." + table); n != "0" {
			t.Errorf("%s rows went to the %s of the shadows", n, table)
		}
	}
}

// behind counts the rows that the stored positions of a group do not cover.
const behind = `SELECT count(*)
	FROM outbox AS o
	JOIN outbox_consumers AS g ON g.group_name = $1
	JOIN outbox_cursors AS c ON c.consumer_id = g.id AND c.shard = o.slot % g.shards
	WHERE o.id = ANY (c.pending) OR (o.id > c.last_id AND NOT pg_visible_in_snapshot(o.xid, c.after_snapshot))`

// shadows is a schema with relations of the names that the library asks for, empty.
const shadows = `CREATE SCHEMA shadows;
	CREATE TABLE shadows.outbox (LIKE public.outbox);
	CREATE TABLE shadows.outbox_consumers (LIKE public.outbox_consumers);
	CREATE TABLE shadows.outbox_cursors (LIKE public.outbox_cursors);
	CREATE TABLE shadows.outbox_epochs (LIKE public.outbox_epochs);
	CREATE SEQUENCE shadows.outbox_id_seq CACHE 100;
	CREATE TABLE shadows.pg_settings (LIKE pg_catalog.pg_settings);
	CREATE TABLE shadows.pg_sequence (seqrelid regclass, seqcache bigint);
	INSERT INTO shadows.pg_sequence VALUES ('public.outbox_id_seq', 100);
	CREATE VIEW shadows.pg_locks AS SELECT * FROM pg_catalog.pg_locks WHERE false;
	CREATE VIEW shadows.pg_stat_activity AS SELECT * FROM pg_catalog.pg_stat_activity WHERE false;
	CREATE TABLE shadows.pg_class (relname name);
	CREATE TABLE shadows.pg_database (datname name)`

// A role that may only read cannot publish, and is told why.
func TestReadOnlyWriterIsToldWhy(t *testing.T) {
	db := newOutbox(t, "")
	pub, err := pgoutbox.NewPublisher(pgserver.Pool(t, db.DSN, outboxtest.Setting("default_transaction_read_only", "on")), pgoutbox.PublisherConfig{}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("t", secret("uuid")), "25006", "read-only")
}

// A writer that is cut short by its own timeout has stored nothing, and is told so by the server's code.
func TestWriterThatTimesOutHasStoredNothing(t *testing.T) {
	db := newOutbox(t, "")
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	if _, err := tx.Exec(t.Context(), "LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	for name, code := range map[string]string{"statement_timeout": "57014", "lock_timeout": "55P03"} {
		pub, err := pgoutbox.NewPublisher(pgserver.Pool(t, db.DSN, outboxtest.Setting(name, "50ms")), pgoutbox.PublisherConfig{}, db.log)
		if err != nil {
			t.Fatal(err)
		}
		says(t, name, pub.Publish("t", secret("uuid")), code, `"public"."outbox"`)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := db.Text("SELECT count(*) FROM outbox"); n != "0" {
		t.Errorf("%s rows are stored", n)
	}
}

// Row-level security on any of the tables is said aloud, and once the role may pass it, nothing is missing. (That of the outbox itself
// is a trap of its own.)
func TestRowLevelSecurityOnOurOwnTablesIsLoud(t *testing.T) {
	for _, table := range []string{"outbox_consumers", "outbox_cursors", "outbox_epochs"} {
		t.Run(table, func(t *testing.T) {
			db := newOutbox(t, "box")
			uuids := db.put(db.Pool, "row", 9)
			role, pool := db.Role()
			for _, grant := range readerGrants {
				db.Exec("GRANT " + grant + " TO " + role)
			}
			db.Exec("ALTER TABLE box." + table + " ENABLE ROW LEVEL SECURITY; ALTER TABLE box." + table + " FORCE ROW LEVEL SECURITY")
			messages := db.subscribe(db.subscriber(pool, db.group("group")))
			db.log.Until(t, "error", "row-level security", table)
			select {
			case msg := <-messages:
				t.Errorf("message %q came", msg.UUID)
			default:
			}
			db.Exec("ALTER ROLE " + role + " BYPASSRLS")
			db.receive(messages, uuids)
		})
	}
}

// A policy that lets a writer's rows in lets them in; one that does not is an error of Publish.
func TestRowLevelSecurityOfAWriter(t *testing.T) {
	db := newOutbox(t, "box")
	role, pool := db.Role()
	db.Exec(`GRANT USAGE ON SCHEMA box TO ` + role + `; GRANT INSERT (topic, key, uuid, metadata, payload) ON box.outbox TO ` + role)
	db.Exec("ALTER TABLE box.outbox ENABLE ROW LEVEL SECURITY; CREATE POLICY p ON box.outbox FOR INSERT WITH CHECK (uuid LIKE 'good%')")
	pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{Schema: "box"}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("t", secret("good 1"), secret("bad")), "violates row-level security", "a policy that lets the rows in")
	if err := pub.Publish("t", secret("good 2")); err != nil {
		t.Error(err)
	}
	if stored := db.Text("SELECT string_agg(uuid, ' ') FROM box.outbox"); stored != "good 2" {
		t.Errorf("stored are %s", stored)
	}
}

// Rows are compared by what the database holds, whatever the session that writes them believes about text.
func TestRowsWrittenUnderHostileSettingsAreStoredAsTheyAre(t *testing.T) {
	db := newOutbox(t, "")
	plain := db.put(db.Pool, "plain", 1)
	hostile := pgserver.Pool(t, db.DSN, outboxtest.Setting("standard_conforming_strings", "off"), outboxtest.Setting("bytea_output", "escape"), outboxtest.Setting("array_nulls", "off"))
	modes := []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	}
	for _, mode := range modes {
		db.put(pgserver.Pool(t, db.DSN, outboxtest.Setting("bytea_output", "escape"), outboxtest.Setting("array_nulls", "off"), func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = mode
		}), strings.ReplaceAll(mode.String(), " ", "-"), 1)
	}
	db.put(hostile, "hostile", 1)
	if n := db.Text("SELECT count(DISTINCT (metadata, payload)) FROM outbox"); n != "1" {
		t.Errorf("one message is stored in %s ways, beside %q", n, plain)
	}
}
