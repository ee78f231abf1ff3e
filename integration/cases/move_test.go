//go:build unix

package cases_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// nextBinDir names the directory of another major version's server programs. A move goes to that version then.
const nextBinDir = "PGOUTBOX_TEST_NEXT_BINDIR"

// move is a way to bring an outbox to an empty database on another server. It returns what ends it, before a relay starts.
type move func(t *testing.T, from *pgserver.Server, source, target *outbox)

// tables are what must come along, those that others refer to first.
var tables = []string{"outbox", "outbox_consumers", "outbox_cursors", "outbox_parked", "outbox_epochs"}

var moves = map[string]move{"dump and restore": dump, "COPY": copyTables, "subscription": subscribe}

// twoServers are the one that the outbox comes from and the one that it goes to, each with an empty database.
func twoServers(t *testing.T) (from *pgserver.Server, source, target *outbox) {
	t.Helper()
	from = ownServer(t, map[string]string{"wal_level": "logical"})
	to := ownServerOf(t, os.Getenv(nextBinDir), nil)
	source = &outbox{Outbox: outboxtest.In(t, from.Database(t), maxConns)}
	target = &outbox{Outbox: outboxtest.Open(t, to.Database(t), maxConns)}
	return from, source, target
}

func maxConns(c *pgxpool.Config) { c.MaxConns = 20 }

// ageBy has a server hand out transaction ids that another one will not reach soon.
func (ob *outbox) ageBy(xids int) {
	ob.Exec(fmt.Sprintf("DO 'BEGIN FOR i IN 1..%d LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END'", xids))
}

func dump(t *testing.T, from *pgserver.Server, source, target *outbox) {
	t.Helper()
	program := filepath.Join(from.BinDir(), "pg_dump")
	if _, err := os.Stat(program); err != nil {
		t.Skip("these server programs came without pg_dump, and another version's may refuse the server")
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	pgDump := exec.CommandContext(ctx, program, source.DSN)
	psql := exec.CommandContext(ctx, filepath.Join(from.BinDir(), "psql"), "-q", "-v", "ON_ERROR_STOP=1", target.DSN)
	var dumping, restoring bytes.Buffer
	pgDump.Stderr, psql.Stderr, psql.Stdout = &dumping, &restoring, io.Discard
	var err error
	psql.Stdin, err = pgDump.StdoutPipe()
	must(t, err)
	must(t, psql.Start())
	dumped := pgDump.Run()
	if restored := psql.Wait(); dumped != nil || restored != nil {
		t.Fatalf("pg_dump: %v: %s; psql: %v: %s", dumped, dumping.String(), restored, restoring.String())
	}
}

// emptyOutbox sets an outbox up whose server is still to be told.
func (ob *outbox) emptyOutbox() {
	ob.Must(pgoutbox.Migrate(ob.Context(), ob.Pool, pgoutbox.SchemaConfig{}))
	ob.Exec("DELETE FROM outbox_epochs")
}

// copySequences is what no copy of tables does.
func (ob *outbox) copySequences(from *outbox) {
	for _, sequence := range []string{"outbox_id_seq", "outbox_consumers_id_seq"} {
		last := outboxtest.Ask[int64](from.Outbox, "SELECT last_value FROM "+sequence)
		ob.Exec("SELECT setval($1, $2)", sequence, last)
	}
}

func copyTables(t *testing.T, _ *pgserver.Server, source, target *outbox) {
	t.Helper()
	target.emptyOutbox()
	tx, err := source.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	must(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	for _, table := range tables {
		columns := outboxtest.Ask[string](source.Outbox, `SELECT string_agg(quote_ident(attname), ',' ORDER BY attnum) FROM pg_attribute
			WHERE attrelid = $1::regclass AND attnum > 0 AND attgenerated = ''`, table)
		var rows bytes.Buffer
		_, err := tx.Conn().PgConn().CopyTo(t.Context(), &rows, "COPY "+table+" ("+columns+") TO STDOUT")
		must(t, err)
		conn, err := target.Pool.Acquire(t.Context())
		must(t, err)
		_, err = conn.Conn().PgConn().CopyFrom(t.Context(), &rows, "COPY "+table+" ("+columns+") FROM STDIN")
		conn.Release()
		must(t, err)
	}
	target.copySequences(source)
}

func subscribe(t *testing.T, _ *pgserver.Server, source, target *outbox) {
	t.Helper()
	target.emptyOutbox()
	source.Exec("CREATE PUBLICATION mover FOR TABLE outbox, outbox_consumers, outbox_cursors, outbox_parked, outbox_epochs")
	target.Exec("CREATE SUBSCRIPTION mover CONNECTION '" + source.DSN + "' PUBLICATION mover")
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
		defer cancel()
		if _, err := target.Pool.Exec(ctx, "DROP SUBSCRIPTION mover"); err != nil {
			t.Error(err)
		}
	})
	target.Eventually("the tables are copied", "SELECT count(*) = 5 FROM pg_subscription_rel WHERE srsubstate = 'r'")
	// The subscription goes on while the source is written to, and ends when it has caught up.
	source.put(t, "", "written while the subscription ran")
	target.Eventually("the subscription has caught up", "SELECT count(*) = 1 FROM outbox WHERE uuid = 'written while the subscription ran'")
	target.copySequences(source)
}
