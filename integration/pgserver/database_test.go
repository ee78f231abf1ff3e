//go:build unix

package pgserver_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestEachTestHasADatabaseOfItsOwn(t *testing.T) {
	server := pgserver.Shared(t)
	t.Logf("on %s", server.Provider())
	var names []string
	t.Run("inner", func(t *testing.T) {
		for range 2 {
			dsn := pgserver.Database(t)
			names = append(names, query[string](t, dsn, "SELECT current_database()"))
			if n := query[int](t, dsn, "SELECT count(*)::int FROM pg_tables WHERE schemaname = 'public'"); n != 0 {
				t.Errorf("%d tables in a new database", n)
			}
			if enc := query[string](t, dsn, "SHOW server_encoding"); enc != "UTF8" {
				t.Errorf("encoding %s", enc)
			}
		}
		if names[0] == names[1] {
			t.Error("one database twice")
		}
	})
	if n := query[int](t, server.DSN(), "SELECT count(*)::int FROM pg_database WHERE datname = ANY($1)", names); n != 0 {
		t.Errorf("%d databases outlive their test", n)
	}
}

func TestDatabaseIsDroppedFromUnderWhateverUsesIt(t *testing.T) {
	server := pgserver.Shared(t)
	var name string
	t.Run("inner", func(t *testing.T) {
		dsn := pgserver.Database(t)
		name = query[string](t, dsn, "SELECT current_database()")
		exec(t, dsn, "BEGIN; CREATE TABLE x (); PREPARE TRANSACTION 'it''s left'")
		conn, err := pgx.Connect(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn // left open: the drop ends it
	})
	if n := query[int](t, server.DSN(), "SELECT count(*)::int FROM pg_database WHERE datname = $1", name); n != 0 {
		t.Error("the database outlives its test")
	}
}

func TestPoolIsConfiguredAndClosed(t *testing.T) {
	var pool *pgxpool.Pool
	t.Run("inner", func(t *testing.T) {
		pool = pgserver.Pool(t, pgserver.Database(t), func(c *pgxpool.Config) { c.MaxConns = 3 })
		if err := pool.Ping(t.Context()); err != nil {
			t.Error(err)
		}
		if n := pool.Stat().MaxConns(); n != 3 {
			t.Errorf("%d connections", n)
		}
	})
	if err := pool.Ping(t.Context()); err == nil {
		t.Error("the pool outlives its test")
	}
}
