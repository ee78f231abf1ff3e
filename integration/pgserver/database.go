package pgserver

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Database creates a database, drops it when the test ends and returns its connection string. Whatever still uses it then
// (sessions, prepared transactions) is ended. A server that the test has closed is left alone.
func (s *Server) Database(t testing.TB) string {
	t.Helper()
	name := "pgoutbox_" + strings.ToLower(rand.Text())
	dsn, err := inDatabase(s.dsn, name)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := createDatabase(ctx, s.dsn, name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := dropDatabase(ctx, s.dsn, dsn, name); err != nil {
			t.Error(err)
		}
	})
	return dsn
}

func createDatabase(ctx context.Context, dsn, name string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return fmt.Errorf("pgserver: create database %s: %w", name, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	// template0: whatever encoding and locale a found server has, tests see these.
	_, err = conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'")
	if err != nil {
		return fmt.Errorf("pgserver: create database %s: %w", name, err)
	}
	return nil
}

// dropDatabase rolls prepared transactions back first: not even FORCE drops a database that has one.
func dropDatabase(ctx context.Context, admin, dsn, name string) error {
	if err := rollbackPrepared(ctx, dsn); err != nil {
		return fmt.Errorf("pgserver: roll back the prepared transactions of %s: %w", name, err)
	}
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return fmt.Errorf("pgserver: drop database %s: %w", name, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("pgserver: drop database %s: %w", name, err)
	}
	return nil
}

func rollbackPrepared(ctx context.Context, dsn string) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	const ask = "SELECT 'ROLLBACK PREPARED ' || quote_literal(gid) FROM pg_prepared_xacts WHERE database = current_database()"
	rows, err := conn.Query(ctx, ask)
	if err != nil {
		return err
	}
	rollbacks, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, sql := range rollbacks {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}
