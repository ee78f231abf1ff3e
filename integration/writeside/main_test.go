// Package writeside tests, on a real server, what stores messages: the schema, plain SQL, and the Publisher.
package writeside

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// rounds is how often a race is run: the tenth part, unless the full run is asked for.
func rounds(full int) int {
	if os.Getenv("PGOUTBOX_TEST_FULL") != "" {
		return full
	}
	return max(full/10, 5)
}

// database is an empty database, and a superuser's pool on it.
type database struct {
	dsn  string
	pool *pgxpool.Pool
}

func newDatabase(t *testing.T) database {
	t.Helper()
	dsn := pgserver.Database(t)
	return database{dsn, pgserver.Pool(t, dsn)}
}

// newOutbox is a database with public.outbox in it.
func newOutbox(t *testing.T) database {
	t.Helper()
	db := newDatabase(t)
	if err := pgoutbox.Migrate(t.Context(), db.pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	return db
}

func (db database) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	if _, err := db.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func (db database) scalar(t *testing.T, sql string, args ...any) string {
	t.Helper()
	var v any
	if err := db.pool.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return fmt.Sprint(v)
}

var roleNumber atomic.Int64

// role creates a role that may do nothing, and returns its name and a pool whose sessions are that role.
func (db database) role(t *testing.T, mod ...func(*pgxpool.Config)) (string, *pgxpool.Pool) {
	t.Helper()
	name := fmt.Sprintf("pgoutbox_role_%d_%d", os.Getpid(), roleNumber.Add(1))
	db.exec(t, "CREATE ROLE "+name+" NOSUPERUSER")
	db.exec(t, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // as from version 15 on
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if _, err := db.pool.Exec(ctx, "DROP OWNED BY "+name+"; DROP ROLE "+name); err != nil {
			t.Error(err)
		}
	})
	mod = append(mod, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = name })
	return name, pgserver.Pool(t, db.dsn, mod...)
}

// writer is a role with the least rights that publishing needs.
func (db database) writer(t *testing.T, mod ...func(*pgxpool.Config)) (string, *pgxpool.Pool) {
	t.Helper()
	name, pool := db.role(t, mod...)
	db.exec(t, "GRANT INSERT (topic, key, uuid, metadata, payload) ON outbox TO "+name)
	return name, pool
}

func setting(name, value string) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams[name] = value }
}

// row is what a table holds of a message.
type row struct {
	ID       int64
	Topic    string
	Key      *string
	UUID     string
	Metadata map[string]string
	Payload  []byte
}

// rows returns the rows of a table, quoted, by ascending id.
func (db database) rows(t *testing.T, table string) []row {
	t.Helper()
	rs, err := db.pool.Query(t.Context(), "SELECT id, topic, key, uuid, metadata, payload FROM "+table+" ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rs, pgx.RowToStructByPos[row])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func (db database) uuids(t *testing.T) string {
	t.Helper()
	var all []string
	for _, r := range db.rows(t, "outbox") {
		all = append(all, r.UUID)
	}
	return strings.Join(all, " ")
}

func newPublisher(t *testing.T, pool *pgxpool.Pool, cfg pgoutbox.PublisherConfig) *pgoutbox.Publisher {
	t.Helper()
	pub, err := pgoutbox.NewPublisher(pool, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	return pub
}

func messages(uuids ...string) []*message.Message {
	var all []*message.Message
	for _, uuid := range uuids {
		all = append(all, message.NewMessage(uuid, []byte("payload of "+uuid)))
	}
	return all
}

func inContext(ctx context.Context, msgs ...*message.Message) []*message.Message {
	for _, msg := range msgs {
		msg.SetContext(ctx)
	}
	return msgs
}

func newUUIDs(n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = watermill.NewShortUUID()
	}
	return all
}

func sqlState(err error) string {
	var server interface{ SQLState() string }
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}

func begin(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	return tx
}

func commit(t *testing.T, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// openStd opens a database/sql handle and closes it when the test ends.
func openStd(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// counter counts the statements that a pool sends.
type counter struct {
	mu         sync.Mutex
	statements []string
}

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.statements = append(c.statements, data.SQL)
	return ctx
}

func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TracePrepareStart counts too: a prepared statement is a round trip that nobody asked for.
func (c *counter) TracePrepareStart(ctx context.Context, _ *pgx.Conn, data pgx.TracePrepareStartData) context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.statements = append(c.statements, "PREPARE "+data.SQL)
	return ctx
}

func (*counter) TracePrepareEnd(context.Context, *pgx.Conn, pgx.TracePrepareEndData) {}

func (c *counter) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	taken := c.statements
	c.statements = nil
	return taken
}

func (c *counter) trace(cfg *pgxpool.Config) { cfg.ConnConfig.Tracer = c }
