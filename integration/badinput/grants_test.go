package badinput

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// readerGrants are the least rights of a reader's role, each as GRANT takes it.
var readerGrants = []string{
	`USAGE ON SCHEMA "box"`,
	`SELECT ON "box"."outbox"`,
	`SELECT ON "box"."outbox_id_seq"`,
	`SELECT ON "box"."outbox_consumers"`,
	`INSERT ON "box"."outbox_consumers"`,
	`SELECT ON "box"."outbox_cursors"`,
	`INSERT ON "box"."outbox_cursors"`,
	`UPDATE ON "box"."outbox_cursors"`,
	`SELECT ON "box"."outbox_epochs"`,
	`SELECT ON "box"."outbox_parked"`,
	`INSERT ON "box"."outbox_parked"`,
	`UPDATE ON "box"."outbox_parked"`,
	`DELETE ON "box"."outbox_parked"`,
}

var namedGrant = regexp.MustCompile(`GRANT ([A-Z]+ ON (?:SCHEMA )?"box"(?:\."\w+")?)`)

// The least rights are enough, and each that is missing is named in such a way that whoever reads it can paste it.
func TestEachMissingRightOfAReaderIsNamed(t *testing.T) {
	db := newOutbox(t, "box")
	uuids := db.put(db.Pool, "row", 3)
	role, pool := db.Role()
	for _, grant := range readerGrants {
		db.Exec("GRANT " + grant + " TO " + role)
	}
	for i, grant := range readerGrants {
		t.Run(grant, func(t *testing.T) {
			db := db.in(t)
			db.Exec("REVOKE " + grant + " FROM " + role)
			cfg := db.group(fmt.Sprintf("group %d", i))
			var fix string
			for what, err := range db.refusals(pool, cfg) {
				says(t, what, err, "GRANT "+grant)
				if err != nil {
					if named := namedGrant.FindStringSubmatch(err.Error()); named != nil {
						fix = named[1]
					}
				}
			}
			if n := db.Text("SELECT count(*) FROM box.outbox_consumers WHERE group_name = $1", cfg.ConsumerGroup); n != "0" {
				t.Errorf("%s consumers were created", n)
			}
			if fix == "" {
				fix = grant
			}
			db.Exec("GRANT " + fix + " TO " + role)
			db.receive(db.subscribe(db.subscriber(pool, cfg)), uuids)
		})
	}
	t.Run("all", func(t *testing.T) {
		db := db.in(t)
		for _, grant := range readerGrants[1:] {
			db.Exec("REVOKE " + grant + " FROM " + role)
		}
		for what, err := range db.refusals(pool, db.group("all")) {
			says(t, what, err, readerGrants[1:]...)
		}
	})
}

// On another server a reader needs two rights more, once, and names them one after the other.
func TestRightsToGoOnOnAnotherServerAreNamed(t *testing.T) {
	db := newOutbox(t, "box")
	uuids := db.put(db.Pool, "row", 3)
	role, pool := db.Role()
	for _, grant := range append(readerGrants, "EXECUTE ON FUNCTION pg_control_system()") {
		db.Exec("GRANT " + grant + " TO " + role)
	}
	db.Exec(`UPDATE "box"."outbox_epochs" SET system_identifier = 1`)
	for _, grant := range []string{`UPDATE ON "box"."outbox"`, `INSERT ON "box"."outbox_epochs"`} {
		for what, err := range db.refusals(pool, db.group("group")) {
			if what != "Leader.Run" { // it reads no rows
				says(t, what, err, "GRANT "+grant, "another server")
			}
		}
		db.Exec("GRANT " + grant + " TO " + role)
	}
	db.receive(db.subscribe(db.subscriber(pool, db.group("group"))), uuids)
}

// A reader whose lock session is another role's looks at its rows with the pool's rights. What it lacks there is logged, and read as
// soon as it is granted: nothing is skipped.
func TestMissingRightOfThePoolLosesNothing(t *testing.T) {
	db := newOutbox(t, "box")
	uuids := db.put(db.Pool, "row", 30)
	role, pool := db.Role()
	cfg := db.group("group")
	cfg.LockConn = db.DSN
	messages := db.subscribe(db.subscriber(pool, cfg))
	db.log.Until(t, "error", "permission denied", "42501")
	db.Exec("GRANT USAGE ON SCHEMA box TO " + role)
	db.log.Until(t, "error", "permission denied for table outbox", "42501")
	db.Exec("GRANT SELECT ON box.outbox TO " + role)
	db.receive(messages, uuids)
}

// Where the server will not tell who it is, the reader says once what it cannot see, and reads.
func TestServerThatWillNotTellItsIdentityIsReadAllTheSame(t *testing.T) {
	db := newOutbox(t, "box")
	uuids := db.put(db.Pool, "row", 3)
	role, pool := db.Role()
	for _, grant := range readerGrants {
		db.Exec("GRANT " + grant + " TO " + role)
	}
	db.Exec("REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC") // of this database alone
	db.receive(db.subscribe(db.subscriber(pool, db.group("group"))), uuids)
	db.log.Until(t, "info", "identity", "EXECUTE ON FUNCTION pg_control_system()")
	db.log.MustBeQuiet(t)
}

// A writer needs five columns and the schema. The error for each is the same, and mends each.
func TestEachMissingRightOfAWriterIsNamed(t *testing.T) {
	db := newOutbox(t, "box")
	role, pool := db.Role()
	pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{Schema: "box"}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	const columns = `INSERT (topic, key, uuid, metadata, payload) ON "box"."outbox"`
	needed := []string{`USAGE ON SCHEMA "box"`}
	for _, column := range []string{"topic", "key", "uuid", "metadata", "payload"} {
		needed = append(needed, fmt.Sprintf(`INSERT (%s) ON "box"."outbox"`, column))
	}
	for _, grant := range needed {
		db.Exec("GRANT " + grant + " TO " + role)
	}
	for _, grant := range needed {
		db.Exec("REVOKE " + grant + " FROM " + role)
		says(t, "without "+grant, pub.Publish("t", secret("refused")), "42501", "GRANT "+needed[0], "GRANT "+columns)
		if strings.HasPrefix(grant, "USAGE") {
			db.Exec("GRANT " + grant + " TO " + role)
		} else {
			db.Exec("GRANT " + columns + " TO " + role)
		}
		if err := pub.Publish("t", secret("with "+grant)); err != nil {
			t.Errorf("with %s: %v", grant, err)
		}
	}
	if n := db.Text("SELECT string_agg(uuid, '; ' ORDER BY id) FROM box.outbox"); n != "with "+strings.Join(needed, "; with ") {
		t.Errorf("stored are %s", n)
	}
}

// What is not there is not the reader's to make.
func TestMissingSchemaIsForMigrate(t *testing.T) {
	db := newOutbox(t, "box")
	all := []string{"outbox", "outbox_id_seq", "outbox_consumers", "outbox_cursors", "outbox_epochs", "outbox_parked"}
	missing := func(cfg pgoutbox.SubscriberConfig, names ...string) {
		t.Helper()
		for what, err := range db.refusals(db.Pool, cfg) {
			says(t, what, err, append(slices.Clone(names), "missing", "run Migrate")...)
		}
	}
	cfg := db.group("group")
	cfg.Schema = "absent"
	missing(cfg, all...)
	cfg.Schema, cfg.Table = "box", "absent"
	missing(cfg, `"box"."absent"`)
	db.Exec("DROP TABLE box.outbox_cursors")
	missing(db.group("group"), `"box"."outbox_cursors"`)
	db.Exec("DROP TABLE box.outbox_epochs; DROP TABLE box.outbox_parked; DROP TABLE box.outbox_consumers")
	missing(db.group("group"), `"box"."outbox_cursors"`, `"box"."outbox_epochs"`, `"box"."outbox_consumers"`)
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{Schema: "box"}); err != nil {
		t.Fatal(err)
	}
	uuids := db.put(db.Pool, "row", 3)
	db.receive(db.subscribe(db.subscriber(db.Pool, db.group("group"))), uuids)
}
