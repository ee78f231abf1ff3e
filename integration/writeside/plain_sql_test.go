package writeside

import (
	"strings"
	"sync"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/jackc/pgx/v5"
)

func TestPlainInsertIsAFullCitizen(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec(`INSERT INTO outbox (topic, payload) VALUES ('orders', 'plain')`)
	db.Exec(`INSERT INTO outbox (topic) VALUES ('orders')`)
	rows := db.rows(t, "outbox")
	if len(rows) != 2 || rows[0].UUID == rows[1].UUID || len(rows[0].UUID) != 36 || rows[0].Key != nil || len(rows[0].Metadata) != 0 ||
		string(rows[0].Payload) != "plain" || rows[1].Payload == nil || len(rows[1].Payload) != 0 {
		t.Errorf("stored %+v", rows)
	}
}

func TestRowKnowsItsTopLevelTransaction(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	tx := db.Begin()
	inner, err := tx.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = inner.Exec(t.Context(), "INSERT INTO outbox (topic) SELECT 't' FROM generate_series(1, 3)")
	if err != nil {
		t.Fatal(err)
	}
	db.Commit(inner)
	var same int
	err = tx.QueryRow(t.Context(), `
		SELECT count(*) FROM outbox
		WHERE xid = pg_current_xact_id() AND created_at BETWEEN now() AND clock_timestamp()`).Scan(&same)
	if err != nil || same != 3 {
		t.Errorf("%d rows of 3 know their transaction and time, %v", same, err)
	}
}

// Whoever waits for a lock in the VALUES of its INSERT comes after the holder of that lock. A table whose id is the first
// column, as it is everywhere else, gets this wrong: the twin shows it.
func TestIDIsDrawnAfterTheLocksOfItsValues(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec(`
		CREATE TABLE orders (id int PRIMARY KEY);
		INSERT INTO orders VALUES (1);
		CREATE TABLE twin (id bigint GENERATED ALWAYS AS IDENTITY, topic text, uuid text)`)
	for table, want := range map[string]string{"outbox": "holder waiter", "twin": "waiter holder"} {
		holder := db.Begin()
		if _, err := holder.Exec(t.Context(), "SELECT FROM orders WHERE id = 1 FOR UPDATE"); err != nil {
			t.Fatal(err)
		}
		waiter := pgserver.Pool(t, db.DSN, outboxtest.Setting("application_name", "waiter on "+table))
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := waiter.Exec(t.Context(), "INSERT INTO "+table+" (topic, uuid) VALUES ('t', (SELECT 'waiter' FROM orders WHERE id = 1 FOR UPDATE))")
			if err != nil {
				t.Error(err)
			}
		})
		db.whenBlocked(t, "waiter on "+table)
		if _, err := holder.Exec(t.Context(), "INSERT INTO "+table+" (topic, uuid) VALUES ('t', 'holder')"); err != nil {
			t.Error(err)
		}
		db.Commit(holder)
		wg.Wait()
		if got := db.Text("SELECT string_agg(uuid, ' ' ORDER BY id) FROM " + table); got != want {
			t.Errorf("%s: %s, want %s", table, got, want)
		}
	}
}

func TestFC46_UnreadableRowsAreRefusedAtInsert(t *testing.T) {
	db := database{outboxtest.New(t)}
	_, writer := db.writer(t)
	tests := []struct{ name, sql, state string }{
		{"metadata NULL", `INSERT INTO outbox (topic, metadata) VALUES ('t', NULL)`, "23502"},
		{"metadata JSON null", `INSERT INTO outbox (topic, metadata) VALUES ('t', 'null')`, "23514"},
		{"metadata array", `INSERT INTO outbox (topic, metadata) VALUES ('t', '[1]')`, "23514"},
		{"metadata number", `INSERT INTO outbox (topic, metadata) VALUES ('t', '7')`, "23514"},
		{"metadata text", `INSERT INTO outbox (topic, metadata) VALUES ('t', '"x"')`, "23514"},
		{"payload NULL", `INSERT INTO outbox (topic, payload) VALUES ('t', NULL)`, "23502"},
		{"uuid NULL", `INSERT INTO outbox (topic, uuid) VALUES ('t', NULL)`, "23502"},
		{"topic NULL", `INSERT INTO outbox (topic) VALUES (NULL)`, "23502"},
		{"no topic", `INSERT INTO outbox (payload) VALUES ('x')`, "23502"},
		{"topic empty", `INSERT INTO outbox (topic) VALUES ('')`, "23514"},
		{"topic of all topics", `INSERT INTO outbox (topic) VALUES ('#')`, "23514"},
		{"names slot", `INSERT INTO outbox (topic, slot) VALUES ('t', 300)`, "428C9"},
		{"names id", `INSERT INTO outbox (topic, id) OVERRIDING SYSTEM VALUE VALUES ('t', 1)`, "42501"},
		{"names xid", `INSERT INTO outbox (topic, xid) VALUES ('t', '1')`, "42501"},
		{"names created_at", `INSERT INTO outbox (topic, created_at) VALUES ('t', now())`, "42501"},
		{"draws an id", `SELECT nextval('outbox_id_seq')`, "42501"},
		{"reads", `SELECT id FROM outbox`, "42501"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := writer.Exec(t.Context(), tt.sql); sqlState(err) != tt.state {
				t.Errorf("got %v, want %s", err, tt.state)
			}
		})
	}
	for name, sql := range map[string]string{ // for the owner as well
		"slot": `INSERT INTO outbox (topic, slot) VALUES ('t', 300)`,
		"id":   `INSERT INTO outbox (topic, id) VALUES ('t', 1)`,
	} {
		if _, err := db.Pool.Exec(t.Context(), sql); sqlState(err) != "428C9" {
			t.Errorf("the owner names %s: got %v", name, err)
		}
	}
	if n := len(db.rows(t, "outbox")); n != 0 {
		t.Errorf("%d rows were stored", n)
	}
	for _, good := range []string{
		`INSERT INTO outbox (topic, metadata) VALUES ('t', '{"nested": {"a": [1, null]}, "number": 7}')`,
		`INSERT INTO outbox (topic, key) VALUES ('t', NULL)`,
		`INSERT INTO outbox (topic, uuid) VALUES ('t', '')`,
	} {
		if _, err := writer.Exec(t.Context(), good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

func TestSlotIsTheHashOfHashPartitions(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec(`INSERT INTO outbox (topic, key) SELECT 't', 'key ' || i FROM generate_series(1, 5000) AS i`)
	db.Exec(`INSERT INTO outbox (topic, uuid) SELECT 't', 'uuid ' || i FROM generate_series(1, 5000) AS i`)
	if n := db.Text(`SELECT count(*) FROM outbox WHERE slot <> (hashtextextended(coalesce(key, uuid), 0) & 255)`); n != "0" {
		t.Errorf("%s rows have another slot", n)
	}
	if n := db.Text(`SELECT count(DISTINCT slot) FROM outbox WHERE key IS NOT NULL`); n != "256" {
		t.Errorf("5000 keys use %s slots", n)
	}
	// The same on every version of the server: rows are read by a slot that another server may have computed.
	golden := map[string]string{"": "109", "a": "177", "customer-42": "240", "ключ": "128", "😀": "218"}
	for key, want := range golden {
		got := db.Text(`INSERT INTO outbox (topic, key) VALUES ('t', $1) RETURNING slot`, key)
		if got != want {
			t.Errorf("slot of %q is %s, want %s", key, got, want)
		}
	}
}

func TestPublishFunctionsStoreAndReturnTheID(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	name, writer := db.writer(t)
	db.Exec("GRANT SELECT (id) ON outbox TO " + name) // what RETURNING needs
	key := "k"
	tests := []struct {
		sql  string
		want row
	}{
		{`SELECT outbox_publish('t', '{"a": 1}')`, row{Payload: []byte(`{"a": 1}`)}},
		{`SELECT outbox_publish('t', '{}')`, row{Payload: []byte(`{}`)}},
		{`SELECT outbox_publish('t', '"ä"', 'k', '{"m": "v"}')`, row{Key: &key, Metadata: map[string]string{"m": "v"}, Payload: []byte(`"ä"`)}},
		{`SELECT outbox_publish(topic => 't', payload => '1', key => 'k')`, row{Key: &key, Payload: []byte(`1`)}},
		{`SELECT outbox_publish('t', '1', '', NULL)`, row{Payload: []byte(`1`)}},
		{`SELECT outbox_publish_bytes('t', '{}')`, row{Payload: []byte(`{}`)}},
		{`SELECT outbox_publish_bytes('t', '\x00ff', 'k', '{"m": "v"}')`, row{Key: &key, Metadata: map[string]string{"m": "v"}, Payload: []byte{0, 0xff}}},
		{`SELECT outbox_publish_bytes('t', '', '', NULL)`, row{Payload: []byte{}}},
	}
	for _, tt := range tests {
		var id int64
		if err := writer.QueryRow(t.Context(), tt.sql).Scan(&id); err != nil {
			t.Errorf("%s: %v", tt.sql, err)
			continue
		}
		rs, err := db.Pool.Query(t.Context(), "SELECT id, topic, key, uuid, metadata, payload FROM outbox WHERE id = $1", id)
		if err != nil {
			t.Fatal(err)
		}
		got, err := pgx.CollectExactlyOneRow(rs, pgx.RowToStructByPos[row])
		if err != nil {
			t.Errorf("%s: %v", tt.sql, err)
			continue
		}
		tt.want.ID, tt.want.Topic, tt.want.UUID = id, "t", got.UUID
		sameRow(t, got, tt.want)
	}
	for sql, state := range map[string]string{
		`SELECT outbox_publish('t', NULL)`:                  "23502",
		`SELECT outbox_publish('', '1')`:                    "23514",
		`SELECT outbox_publish('t', '1', NULL, '[]')`:       "23514",
		`SELECT outbox_publish_bytes('#', '')`:              "23514",
		`SELECT outbox_publish('t', 'not JSON')`:            "22P02",
		`SELECT outbox_publish_bytes('t', '', NULL, '"x"')`: "23514",
	} {
		if _, err := writer.Exec(t.Context(), sql); sqlState(err) != state {
			t.Errorf("%s: got %v, want %s", sql, err, state)
		}
	}
}

func TestTriggerPublishesInItsTransaction(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	name, writer := db.writer(t)
	db.Exec("GRANT SELECT (id) ON outbox TO " + name)
	db.Exec(`
		CREATE TABLE orders (id int PRIMARY KEY, state text);
		GRANT SELECT, INSERT, UPDATE ON orders TO ` + name + `;
		CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			PERFORM outbox_publish('orders', to_jsonb(NEW), NEW.id::text);
			RETURN NULL;
		END $$;
		CREATE TRIGGER announce AFTER INSERT OR UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION announce();`)
	tx := begin(t, writer)
	for _, sql := range []string{`INSERT INTO orders VALUES (1, 'new'), (2, 'new')`, `UPDATE orders SET state = 'paid' WHERE id = 1`} {
		if _, err := tx.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(db.rows(t, "outbox")); n != 0 {
		t.Errorf("%d rows before the commit", n)
	}
	db.Commit(tx)
	var got []string
	for _, r := range db.rows(t, "outbox") {
		got = append(got, *r.Key+string(r.Payload))
	}
	want := `1{"id": 1, "state": "new"} 2{"id": 2, "state": "new"} 1{"id": 1, "state": "paid"}`
	if strings.Join(got, " ") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, " "), want)
	}
}

func sameRow(t *testing.T, got, want row) {
	t.Helper()
	if got.Topic != want.Topic || got.UUID != want.UUID || string(got.Payload) != string(want.Payload) || got.Payload == nil ||
		(got.Key == nil) != (want.Key == nil) || (got.Key != nil && *got.Key != *want.Key) || len(got.Metadata) != len(want.Metadata) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	for k, v := range want.Metadata {
		if got.Metadata[k] != v {
			t.Errorf("metadata %q is %q, want %q", k, got.Metadata[k], v)
		}
	}
}
