package writeside

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

var execModes = map[string]pgx.QueryExecMode{
	"cache_statement": pgx.QueryExecModeCacheStatement,
	"cache_describe":  pgx.QueryExecModeCacheDescribe,
	"describe_exec":   pgx.QueryExecModeDescribeExec,
	"exec":            pgx.QueryExecModeExec,
	"simple_protocol": pgx.QueryExecModeSimpleProtocol,
}

func execMode(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = mode }
}

// shape is everything in the catalogs that Migrate is answerable for.
func (db database) shape(t *testing.T) string {
	t.Helper()
	return db.Text(`
		SELECT string_agg(line, E'\n' ORDER BY line COLLATE "C")
		FROM (
			SELECT n.nspname || '.' || c.relname || ' ' || c.relkind::text || ' ' || c.oid || ' ' || coalesce(obj_description(c.oid), '')
			FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
			WHERE n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
			UNION ALL
			SELECT p.oid::regprocedure::text || ' ' || p.xmin
			FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
			WHERE n.nspname NOT LIKE 'pg\_%' AND n.nspname <> 'information_schema'
		) AS all_of_them (line)`)
}

func TestFC37_TenProcessesMigrateAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	for _, cfg := range []pgoutbox.SchemaConfig{{}, {Schema: "Own \"schema\"", Table: "Messages"}} {
		for round := range outboxtest.Rounds(50) {
			var wg sync.WaitGroup
			start := make(chan struct{})
			for i := range 10 {
				wg.Go(func() {
					conn, err := connect(t.Context(), db.DSN, map[string]string{ // a role's defaults
						"default_transaction_isolation": []string{"read committed", "repeatable read", "serializable"}[i%3],
						"lock_timeout":                  "1ms",
					})
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close(context.WithoutCancel(t.Context()))
					<-start
					if err := pgoutbox.Migrate(t.Context(), conn, cfg); err != nil {
						t.Errorf("round %d: %v", round, err)
					}
				})
			}
			close(start)
			wg.Wait()
			pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{Schema: cfg.Schema, Table: cfg.Table})
			if err := pub.Publish("t", messages("a")...); err != nil {
				t.Errorf("round %d: %v", round, err)
			}
			db.Exec(`DROP SCHEMA IF EXISTS public, "Own ""schema""" CASCADE`)
			if round%2 == 0 { // both with and without the schema
				db.Exec(`CREATE SCHEMA public; CREATE SCHEMA "Own ""schema"""`)
			}
		}
	}
}

// connect is what a process of its own does.
func connect(ctx context.Context, dsn string, settings map[string]string) (*pgx.Conn, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	maps.Copy(cfg.RuntimeParams, settings)
	return pgx.ConnectConfig(ctx, cfg)
}

func TestFC37_TwoOutboxesMigrateIntoOneNewSchemaAtOnce(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	for round := range outboxtest.Rounds(50) {
		var wg sync.WaitGroup
		for _, table := range []string{"a", "b", "c", "d"} {
			wg.Go(func() {
				if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{Schema: "fresh", Table: table}); err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		db.Exec("DROP SCHEMA fresh CASCADE")
	}
}

func TestFC37_RoleThatMayNotCreateMigratesWhatIsInPlace(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	_, pool := db.Role(outboxtest.Setting("default_transaction_read_only", "on"))
	before := db.shape(t)
	if err := pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Error(err)
	}
	if after := db.shape(t); after != before {
		t.Errorf("changed\n%s\nto\n%s", before, after)
	}
}

func TestMigrateNamesTheMissingGrant(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	name, pool := db.Role()
	migrate := func(cfg pgoutbox.SchemaConfig) error { return pgoutbox.Migrate(t.Context(), pool, cfg) }
	wants := func(cfg pgoutbox.SchemaConfig, want string) {
		t.Helper()
		if err := migrate(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v does not say %q", err, want)
		}
	}
	current := db.Text("SELECT current_database()")

	wants(pgoutbox.SchemaConfig{Schema: "own"}, `GRANT CREATE ON DATABASE "`+current+`" TO "`+name+`"`)
	db.Exec("GRANT CREATE ON DATABASE " + current + " TO " + name)
	if err := migrate(pgoutbox.SchemaConfig{Schema: "own"}); err != nil {
		t.Error(err)
	}
	db.Exec("REVOKE CREATE ON DATABASE " + current + " FROM " + name)

	wants(pgoutbox.SchemaConfig{}, `GRANT CREATE ON SCHEMA "public" TO "`+name+`"`)
	db.Exec("GRANT CREATE ON SCHEMA public TO " + name)
	if err := migrate(pgoutbox.SchemaConfig{}); err != nil { // without CREATE on the database
		t.Error(err)
	}

	db.Exec("ALTER TABLE outbox OWNER TO CURRENT_USER; DROP INDEX outbox_xid_id")
	wants(pgoutbox.SchemaConfig{}, "no outbox_xid_id")
}

func TestMigrateTwiceChangesNothing(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	before := db.shape(t)
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	if after := db.shape(t); after != before {
		t.Errorf("changed\n%s\nto\n%s", before, after)
	}
}

func TestMigrateRestoresWhatIsMissing(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec("INSERT INTO outbox (topic) VALUES ('t')")
	for _, damage := range []string{
		"DROP FUNCTION outbox_publish_bytes",
		"DROP INDEX outbox_xid_id",
		"DROP TABLE outbox_cursors",
		"COMMENT ON TABLE outbox IS NULL", // a dump without comments
	} {
		db.Exec(damage)
		if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{}); err != nil {
			t.Errorf("after %s: %v", damage, err)
		}
	}
	want := database{outboxtest.New(t)}
	list := `SELECT string_agg(relname || coalesce(obj_description(oid), ''), ' ' ORDER BY relname COLLATE "C")
		FROM pg_class WHERE relnamespace = 'public'::regnamespace`
	if got, want := db.Text(list), want.Text(list); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
	if n := db.Text("SELECT count(*) FROM outbox"); n != "1" {
		t.Errorf("%s rows left of 1", n)
	}
}

func TestMigrateWorksInEveryExecMode(t *testing.T) {
	t.Parallel()
	for name, mode := range execModes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database{outboxtest.Open(t, pgserver.Database(t))}
			pool := pgserver.Pool(t, db.DSN, execMode(mode))
			for range 2 {
				if err := pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{Schema: "s"}); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestMigrateIgnoresTheRolesDefaults(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	db.Exec("CREATE SCHEMA decoy; CREATE TABLE decoy.pg_class (oid oid, relname name, relnamespace oid, relowner oid)")
	pool := pgserver.Pool(t, db.DSN,
		outboxtest.Setting("default_transaction_isolation", "serializable"),
		outboxtest.Setting("default_transaction_read_only", "on"),
		outboxtest.Setting("standard_conforming_strings", "off"),
		outboxtest.Setting("search_path", "decoy, pg_catalog"),
		outboxtest.Setting("lock_timeout", "1"))
	var shapes []string
	for range 2 {
		if err := pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{Schema: `a\'b`}); err != nil {
			t.Fatal(err)
		}
		shapes = append(shapes, db.shape(t))
	}
	if shapes[0] != shapes[1] {
		t.Errorf("the second call changed\n%s\nto\n%s", shapes[0], shapes[1])
	}
}

func TestMigrateLocksTheDocumentedKeyAndOnlyToChangeSomething(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	sum := sha256.Sum256([]byte("pgoutbox migrate\x00public"))
	another := db.Begin()
	if _, err := another.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", int64(binary.BigEndian.Uint64(sum[:8]))); err != nil {
		t.Fatal(err)
	}
	pool := pgserver.Pool(t, db.DSN, outboxtest.Setting("application_name", "migrates"))
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{}); err != nil {
			t.Error(err)
		}
	})
	db.whenBlocked(t, "migrates")
	db.Commit(another)
	wg.Wait()

	another = db.Begin()
	if _, err := another.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", int64(binary.BigEndian.Uint64(sum[:8]))); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := pgoutbox.Migrate(ctx, pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Errorf("in place, it waits: %v", err)
	}
}

func TestMigrateRefusesANewerSchema(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec("COMMENT ON TABLE outbox IS 'watermill-pgoutbox schema 1000'; DROP INDEX outbox_xid_id")
	before := db.shape(t)
	err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{})
	if err == nil || !strings.Contains(err.Error(), "update the library") {
		t.Errorf("error %v", err)
	}
	if after := db.shape(t); after != before {
		t.Errorf("changed\n%s\nto\n%s", before, after)
	}
}

func TestMigrateRefusesSomebodysTable(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	db.Exec("CREATE TABLE outbox (id bigint PRIMARY KEY, topic text, payload bytea)")
	before := db.shape(t)
	err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{})
	if err == nil || !strings.Contains(err.Error(), "not an outbox") {
		t.Errorf("error %v", err)
	}
	if after := db.shape(t); after != before {
		t.Errorf("changed\n%s\nto\n%s", before, after)
	}
}

func TestMigrateRefusesToJoinATransaction(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	pooled, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer pooled.Release()
	for name, db := range map[string]pgoutbox.Beginner{"a conn": pooled.Conn(), "a pool's conn": pooled} {
		if _, err := pooled.Exec(t.Context(), "BEGIN; CREATE TABLE mine ()"); err != nil {
			t.Fatal(err)
		}
		err = pgoutbox.Migrate(t.Context(), db, pgoutbox.SchemaConfig{})
		if err == nil || !strings.Contains(err.Error(), "in a transaction") {
			t.Errorf("%s: error %v", name, err)
		}
		if _, err := pooled.Exec(t.Context(), "ROLLBACK"); err != nil {
			t.Fatal(err)
		}
	}
	for name, nothing := range map[string]pgoutbox.Beginner{"nil": nil, "a nil pool": (*pgxpool.Pool)(nil)} {
		if err := pgoutbox.Migrate(t.Context(), nothing, pgoutbox.SchemaConfig{}); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	if n := db.Text("SELECT count(*) FROM pg_class WHERE relname IN ('mine', 'outbox')"); n != "0" {
		t.Errorf("%s tables", n)
	}
}

func TestMigrateDoesNotQueueWritersForLong(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	tx := db.Begin()
	if err := newPublisher(t, nil, pgoutbox.PublisherConfig{}).WithTx(tx).Publish("t", messages("open")...); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	if err := pgoutbox.Migrate(ctx, db.Pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Errorf("in place, it waits for a writer: %v", err)
	}
	db.Exec("DROP FUNCTION outbox_publish_bytes") // not in place; what follows is CREATE INDEX's wait for the open writer
	err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{})
	if sqlState(err) != "55P03" {
		t.Errorf("error %v", err)
	}
	db.Commit(tx)
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Error(err)
	}
}

func TestMigrateGivesUpWithItsContext(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pgoutbox.Migrate(ctx, db.Pool, pgoutbox.SchemaConfig{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestSchemaSQLIsWhatMigrateRuns(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]pgoutbox.SchemaConfig{
		"public.outbox": {},
		"own names":     {Schema: "a'b\\\"c", Table: "d\ne;f"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			text, err := pgoutbox.SchemaSQL(cfg)
			if err != nil {
				t.Fatal(err)
			}
			run := map[string]func(database){
				"in one round trip": func(db database) { db.Exec(text) },
			}
			if psql, err := exec.LookPath("psql"); err == nil {
				run["psql -1"] = func(db database) {
					cmd := exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1", db.DSN)
					cmd.Stdin = strings.NewReader(text)
					if out, err := cmd.CombinedOutput(); err != nil {
						t.Fatalf("%v: %s", err, out)
					}
				}
			} else {
				t.Log("psql is not in PATH, only a driver runs the SQL")
			}
			for how, run := range run {
				db := database{outboxtest.Open(t, pgserver.Database(t))}
				run(db)
				run(db) // again, it changes nothing
				before := db.shape(t)
				_, pool := db.Role()
				if err := pgoutbox.Migrate(t.Context(), pool, cfg); err != nil { // may not create, so finds it current
					t.Errorf("%s: %v", how, err)
				}
				if after := db.shape(t); after != before {
					t.Errorf("%s: Migrate changed\n%s\nto\n%s", how, before, after)
				}
			}
		})
	}
}

func TestSchemaSQLNeedsNoRightOnTheDatabase(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.Open(t, pgserver.Database(t))}
	name, pool := db.Role()
	db.Exec("GRANT CREATE ON SCHEMA public TO " + name)
	text, err := pgoutbox.SchemaSQL(pgoutbox.SchemaConfig{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), text); err != nil {
		t.Error(err)
	}
}

func TestAnyLegalNameWorks(t *testing.T) {
	t.Parallel()
	for name, cfg := range map[string]pgoutbox.SchemaConfig{
		"quotes and dots":  {Schema: `we"ird.Sch'ema`, Table: `Out"box.'s`},
		"SQL in names":     {Schema: `x"; DROP TABLE victim; --`, Table: "x\n; DROP TABLE victim; --"},
		"dollars":          {Schema: "$1", Table: "$$ $pgoutbox $x$"},
		"unicode":          {Schema: "схема", Table: "исходящие_сообщения"},
		"the longest":      {Schema: strings.Repeat("s", 63), Table: strings.Repeat("t", 46)},
		"only upper case":  {Schema: "OUTBOX", Table: "PUBLIC"},
		"keywords":         {Schema: "select", Table: "table"},
		"blanks":           {Schema: " ", Table: "	"},
		"comments":         {Schema: "/*", Table: "*/--"},
		"our own defaults": {Schema: "outbox", Table: "public"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := database{outboxtest.Open(t, pgserver.Database(t))}
			db.Exec("CREATE TABLE victim ()")
			for range 2 {
				if err := pgoutbox.Migrate(t.Context(), db.Pool, cfg); err != nil {
					t.Fatal(err)
				}
			}
			pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{Schema: cfg.Schema, Table: cfg.Table})
			if err := pub.Publish("t", messages("by Publish")...); err != nil {
				t.Error(err)
			}
			table := pgx.Identifier{cfg.Schema, cfg.Table}.Sanitize()
			db.Exec("INSERT INTO " + table + " (topic, uuid) VALUES ('t', 'by INSERT')")
			for _, suffix := range []string{"_publish", "_publish_bytes"} {
				db.Exec("SELECT " + pgx.Identifier{cfg.Schema, cfg.Table + suffix}.Sanitize() + "('t', '{}')")
			}
			if n := len(db.rows(t, table)); n != 4 {
				t.Errorf("%d rows of 4", n)
			}
			if n := db.Text("SELECT count(*) FROM pg_class WHERE relname = 'victim'"); n != "1" {
				t.Error("a name ran as SQL")
			}
		})
	}
}

func TestEveryStatementPrepares(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	files, err := filepath.Glob("../../internal/queries/*.sql")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d statements, %v", len(files), err)
	}
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Conn().Prepare(t.Context(), file, string(text)); err != nil {
			t.Errorf("%s: %v", filepath.Base(file), err)
		}
	}
}
