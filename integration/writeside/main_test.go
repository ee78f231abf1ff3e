// Package writeside tests, on a real server, what stores messages: the schema, plain SQL, and the Publisher.
package writeside

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// database is an outbox, or one in which nothing is set up yet.
type database struct{ *outboxtest.Outbox }

// writer is a role with the least rights that publishing needs.
func (db database) writer(t *testing.T, mod ...func(*pgxpool.Config)) (string, *pgxpool.Pool) {
	t.Helper()
	name, pool := db.Role(mod...)
	db.Exec("GRANT INSERT (topic, key, uuid, metadata, payload) ON outbox TO " + name)
	return name, pool
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
	rs, err := db.Pool.Query(t.Context(), "SELECT id, topic, key, uuid, metadata, payload FROM "+table+" ORDER BY id")
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
