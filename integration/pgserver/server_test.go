//go:build unix

package pgserver_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) {
	if os.Getenv("PGSERVER_TEST_VICTIM") != "" {
		victim()
	}
	os.Exit(pgserver.Run(m))
}

// local starts a server from local binaries; tests that stop it need one.
func local(t *testing.T) *pgserver.Server {
	t.Helper()
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local")
	s, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func query[T any](t *testing.T, dsn, sql string, args ...any) T {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	rows, err := conn.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatal(err)
	}
	v, err := pgx.CollectOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func exec(t *testing.T, dsn, sql string) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context()) // clean-up runs after the test's own has ended
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, sql); err != nil {
		t.Fatal(err)
	}
}

func TestStartedServerHasTheSettingsTestsRelyOn(t *testing.T) {
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local")
	s, err := pgserver.Start(t.Context(), pgserver.Options{Settings: map[string]string{"work_mem": "3MB", "log_line_prefix": "it's "}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	for name, want := range map[string]string{
		"max_connections": "500", "max_prepared_transactions": "20", "server_encoding": "UTF8", "fsync": "on",
		"work_mem": "3MB", "log_line_prefix": "it's ",
	} {
		if got := query[string](t, s.DSN(), "SELECT current_setting($1)", name); got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	if got := query[string](t, s.DSN(), "SELECT datcollate FROM pg_database WHERE datname = 'postgres'"); got != "C" {
		t.Errorf("locale is %q", got)
	}
	if got := query[int](t, s.DSN(), "SELECT current_setting('server_version_num')::int / 10000"); got != s.Major() {
		t.Errorf("Major is %d, the server says %d", s.Major(), got)
	}
}

func TestRestartKeepsCommittedRows(t *testing.T) {
	s := local(t)
	dsn := s.Database(t)
	exec(t, dsn, "CREATE TABLE kept AS SELECT 1 AS n")
	before, err := s.PostmasterPID()
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"fast", "immediate"} {
		if err := s.Restart(t.Context(), mode); err != nil {
			t.Fatal(err)
		}
		if n := query[int](t, dsn, "SELECT count(*)::int FROM kept"); n != 1 {
			t.Errorf("%s: %d rows left", mode, n)
		}
	}
	if after, err := s.PostmasterPID(); err != nil || after == before {
		t.Errorf("postmaster %d, before %d, error %v", after, before, err)
	}
}

func TestStoppedServerStartsAgainOnItsPort(t *testing.T) {
	s := local(t)
	if err := s.Stop(t.Context(), "immediate"); err != nil {
		t.Fatal(err)
	}
	if _, err := s.PostmasterPID(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("process id: %v", err)
	}
	if conn, err := pgx.Connect(t.Context(), s.DSN()); err == nil {
		conn.Close(t.Context())
		t.Error("the server still answers")
	}
	if err := s.StartAgain(t.Context()); err != nil {
		t.Fatal(err)
	}
	if one := query[int](t, s.DSN(), "SELECT 1"); one != 1 {
		t.Error("no answer")
	}
}

func TestCloseStopsTheServerAndRemovesItsDirectory(t *testing.T) {
	s := local(t)
	pid, err := s.PostmasterPID()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Second, "the process is gone", func() bool { return !isRunning(pid) })
	if _, err := os.Stat(s.DataDir()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the directory is still there: %v", err)
	}
	if conn, err := pgx.Connect(t.Context(), s.DSN()); err == nil {
		conn.Close(t.Context())
		t.Error("the server still answers")
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if err := s.StartAgain(t.Context()); err == nil {
		t.Error("a closed server started again")
	}
}

func TestProviderThatCannotDeliverIsNamedInOneLine(t *testing.T) {
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "")
	t.Setenv("PGOUTBOX_TEST_DSN", "postgres://nobody:hush@127.0.0.1:1/x?sslmode=disable&connect_timeout=1")
	t.Setenv("DOCKER_HOST", silentSocket(t))
	var lines []string
	var said []time.Time
	s, err := pgserver.Start(t.Context(), pgserver.Options{Logf: func(format string, args ...any) {
		lines = append(lines, fmt.Sprintf(format, args...))
		said = append(said, time.Now())
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	if len(lines) != 3 || !strings.Contains(lines[0], "dsn:") || !strings.Contains(lines[1], "docker: no daemon answers") ||
		!strings.Contains(lines[2], "local binaries") {
		t.Fatalf("logged:\n%s", strings.Join(lines, "\n"))
	}
	for _, line := range lines {
		if strings.ContainsAny(line, "\n\r") || strings.Contains(line, "hush") {
			t.Errorf("not a line for people: %q", line)
		}
	}
	if took := said[1].Sub(said[0]); took > 2*time.Second {
		t.Errorf("a daemon that does not answer cost %s", took)
	}
}

func TestNoProviderLeftSaysWhatToInstall(t *testing.T) {
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local")
	t.Setenv("PGOUTBOX_TEST_BINDIR", t.TempDir())
	_, err := pgserver.Start(t.Context(), pgserver.Options{})
	if err == nil || !strings.Contains(err.Error(), "apt-get install postgresql") || !strings.Contains(err.Error(), "PGOUTBOX_TEST_BINDIR") {
		t.Errorf("error: %v", err)
	}
}

func TestVariablesNarrowTheChoice(t *testing.T) {
	tests := []struct {
		name string
		env  map[string]string
		want string // in the error
	}{
		{"a final provider is not followed by another", map[string]string{"PGOUTBOX_TEST_PROVIDER": "dsn", "PGOUTBOX_TEST_DSN": ""}, "PGOUTBOX_TEST_DSN is not set"},
		{"an unknown provider is refused", map[string]string{"PGOUTBOX_TEST_PROVIDER": "cloud"}, "dsn, docker or local"},
		{"a version is a number", map[string]string{"PGOUTBOX_TEST_PROVIDER": "local", "PGOUTBOX_TEST_VERSION": "latest"}, "major version"},
		{"a version that is not installed is not replaced", map[string]string{"PGOUTBOX_TEST_PROVIDER": "local", "PGOUTBOX_TEST_VERSION": "99"}, "PostgreSQL"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for k, v := range tt.env {
				t.Setenv(k, v)
			}
			s, err := pgserver.Start(t.Context(), pgserver.Options{})
			if err == nil {
				_ = s.Close()
				t.Fatal("a server started")
			}
			if !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q lacks %q", err, tt.want)
			}
		})
	}
}

func TestServerGivenByDSNIsUsedAndLeftRunning(t *testing.T) {
	owner := pgserver.Shared(t)
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "dsn")
	c, err := pgx.ParseConfig(owner.DSN())
	if err != nil {
		t.Fatal(err)
	}
	for name, dsn := range map[string]string{
		"url":  owner.DSN(),
		"keys": fmt.Sprintf("host=%s port=%d user=%s password='%s' dbname=%s", c.Host, c.Port, c.User, c.Password, c.Database),
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("PGOUTBOX_TEST_DSN", dsn)
			s, err := pgserver.Start(t.Context(), pgserver.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(s.Provider(), "PGOUTBOX_TEST_DSN") {
				t.Errorf("provider %q", s.Provider())
			}
			if got := query[string](t, s.Database(t), "SELECT current_database()"); !strings.HasPrefix(got, "pgoutbox_") {
				t.Errorf("database %q", got)
			}
			if err := s.Stop(t.Context(), "fast"); err == nil || !strings.Contains(err.Error(), "local binaries") {
				t.Errorf("Stop: %v", err)
			}
			if err := s.Close(); err != nil {
				t.Error(err)
			}
			if one := query[int](t, owner.DSN(), "SELECT 1"); one != 1 {
				t.Error("the server is gone")
			}
		})
	}
}

func TestServerGivenByDSNIsRefusedWhenTestsWouldFailOnIt(t *testing.T) {
	owner := pgserver.Shared(t)
	exec(t, owner.DSN(), "CREATE ROLE pgserver_plain LOGIN")
	t.Cleanup(func() { exec(t, owner.DSN(), "DROP ROLE pgserver_plain") })
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "dsn")
	tests := []struct {
		name, dsn string
		options   pgserver.Options
		want      string
	}{
		{"no superuser", strings.Replace(owner.DSN(), "postgres@", "pgserver_plain@", 1), pgserver.Options{}, "not a superuser"},
		{"other settings", owner.DSN(), pgserver.Options{Settings: map[string]string{"wal_level": "logical"}}, "wal_level is"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("PGOUTBOX_TEST_DSN", tt.dsn)
			if _, err := pgserver.Start(t.Context(), tt.options); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error: %v", err)
			}
		})
	}
}
