package pgoutbox

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// SchemaConfig says where the outbox lives. The zero value is public.outbox. Every statement of this package qualifies
// and quotes both names, so any legal identifier works, whatever the search_path.
type SchemaConfig struct {
	Schema string // "" = public; at most 63 bytes
	Table  string // "" = outbox; at most 46 bytes, because the names of the other objects are derived from it
}

// Beginner begins transactions: a *pgxpool.Pool, a *pgxpool.Conn or a *pgx.Conn. A pgx.Tx does not fit, so that Migrate
// cannot run inside a transaction of yours.
type Beginner interface {
	BeginTx(context.Context, pgx.TxOptions) (pgx.Tx, error)
}

var (
	_ Beginner = (*pgxpool.Pool)(nil)
	_ Beginner = (*pgxpool.Conn)(nil)
	_ Beginner = (*pgx.Conn)(nil)
)

const (
	migrateLockTimeout = 5 * time.Second // an upgrade must not queue all writers behind somebody's long transaction
	rollbackTimeout    = 5 * time.Second
)

// Migrate creates the outbox, or upgrades it to the schema that this version of the library knows. It is the only thing in
// the package that runs DDL. Run it at every start, from as many processes at once as you like: when the schema is in
// place and current it only reads the catalogs, so a role that may not create anything succeeds, on a standby too.
//
// Otherwise everything happens in one READ COMMITTED transaction of its own, whatever the role's defaults, under the
// advisory transaction lock whose key is the first 8 bytes (big endian) of sha256("pgoutbox migrate\x00" + schema). It
// waits for that lock as long as ctx allows, and for any other at most 5 s.
//
// An error says what is missing, the grant included, and nothing has changed, with one exception: if the connection is
// lost during the final commit, the outbox may be in place. Calling Migrate again is safe after every error. A schema
// written by a newer version of the library is refused, and so are a table of that name that is not an outbox, a db that
// is in a transaction, and a server older than PostgreSQL 14.
func Migrate(ctx context.Context, db Beginner, cfg SchemaConfig) error {
	n, err := newNames(cfg.Schema, cfg.Table)
	if err != nil {
		return fmt.Errorf("pgoutbox: migrate: %w", err)
	}
	if err := migrate(ctx, db, n); err != nil {
		return fmt.Errorf("pgoutbox: migrate %s: %w", n.quoted(""), err)
	}
	return nil
}

// SchemaSQL returns what Migrate runs, for a migration tool of your own. Run it in one transaction (psql -1, or the way your
// tool runs a migration); running it again changes nothing. It creates the schema only where it does not exist, since
// even CREATE SCHEMA IF NOT EXISTS needs the right to create one. A tool that splits its input at every semicolon needs to
// be told not to: functions have bodies.
func SchemaSQL(cfg SchemaConfig) (string, error) {
	n, err := newNames(cfg.Schema, cfg.Table)
	if err != nil {
		return "", fmt.Errorf("pgoutbox: schema: %w", err)
	}
	return n.ddl(), nil
}

// ddl is schema.sql for n, with two changes: the schema is created only where it does not exist, and the table's comment
// records the version.
func (n names) ddl() string {
	plain := "CREATE SCHEMA IF NOT EXISTS " + quoteIdentifier(n.schema) + ";"
	guarded := dollarDo(
		"IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = "+quoteLiteral(n.schema)+") THEN",
		"	CREATE SCHEMA "+quoteIdentifier(n.schema)+";",
		"END IF;")
	return strings.Replace(n.rewrite(schemaSource), plain, guarded, 1) + "\n" +
		"-- What Migrate looks at before it touches anything.\n" +
		"COMMENT ON TABLE " + n.quoted("") + " IS " + quoteLiteral(schemaComment(schemaVersion)) + ";\n"
}

func dollarDo(lines ...string) string {
	return "DO " + dollarTag + "\nBEGIN\n\t" + strings.Join(lines, "\n\t") + "\nEND\n" + dollarTag + ";"
}

// quoteLiteral uses the E form, the only one that means the same whatever standard_conforming_strings is.
func quoteLiteral(s string) string {
	return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `''`).Replace(s) + "'"
}

func migrate(ctx context.Context, db Beginner, n names) error {
	if isNil(db) {
		return errors.New("db is nil")
	}
	if inTransaction(db) {
		return errors.New("the connection is in a transaction; Migrate needs one of its own")
	}
	current, err := schemaIsCurrent(ctx, db, n)
	if err != nil || current {
		return err
	}
	return applySchema(ctx, db, n)
}

func inTransaction(db Beginner) bool {
	switch db := db.(type) {
	case *pgx.Conn:
		return db.PgConn().TxStatus() != 'I'
	case *pgxpool.Conn:
		return db.Conn().PgConn().TxStatus() != 'I'
	}
	return false
}

// schemaIsCurrent is a read-only look, before any lock: most calls end here.
func schemaIsCurrent(ctx context.Context, db Beginner, n names) (bool, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly})
	if err != nil {
		return false, fmt.Errorf("begin the look at the catalogs: %w", err)
	}
	defer rollback(ctx, tx)
	state, err := readSchemaState(ctx, tx, n)
	if err != nil {
		return false, err
	}
	return state.current(n)
}

func applySchema(ctx context.Context, db Beginner, n names) error {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return fmt.Errorf("begin the migration: %w", err)
	}
	defer rollback(ctx, tx)

	// The role's own timeouts are made for its queries. ctx bounds this wait.
	const settings = `SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0; SET LOCAL client_min_messages = warning`
	if _, err := tx.Exec(ctx, settings, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("prepare the migration's session: %w", err)
	}
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1::bigint)", pgx.QueryExecModeExec, n.migrateLock()); err != nil {
		return fmt.Errorf("wait for another migration: %w", err)
	}
	state, err := readSchemaState(ctx, tx, n) // sees what the one before us committed
	if err != nil {
		return err
	}
	if current, err := state.current(n); err != nil || current {
		return err
	}
	bound := fmt.Sprintf("SET LOCAL lock_timeout = %d", migrateLockTimeout.Milliseconds())
	if _, err := tx.Exec(ctx, bound, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("bound the waits for locks: %w", err)
	}
	if _, err := tx.Exec(ctx, n.ddl(), pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("create or upgrade: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// migrateLock leaves the table out: two outboxes may be created in one new schema at once, and CREATE SCHEMA races.
func (n names) migrateLock() int64 {
	sum := sha256.Sum256([]byte("pgoutbox migrate\x00" + n.schema))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// rollback outlives ctx: a transaction left open would hold its locks, and the pool would lose a connection.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // after Commit it does nothing, and a connection that cannot roll back is closed by pgx
}
