//go:build unix

package pgserver_test

import (
	"net"
	"net/url"
	"path/filepath"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestPgBouncerIsGoneAfterItsTest(t *testing.T) {
	server := pgserver.Shared(t)
	temp := openTempDir(t)
	t.Setenv("TMPDIR", temp)
	var addr string
	t.Run("inner", func(t *testing.T) {
		dsn := server.Database(t)
		b := server.PgBouncer(t, pgserver.PgBouncerOptions{Mode: "transaction", PoolSize: 1})
		u, err := url.Parse(b.DSN(dsn))
		if err != nil {
			t.Fatal(err)
		}
		addr = u.Host
		if direct, pooled := query[string](t, dsn, "SELECT current_database()"), query[string](t, b.DSN(dsn), "SELECT current_database()"); direct != pooled {
			t.Errorf("it leads to %s instead of %s", pooled, direct)
		}
		if found, err := filepath.Glob(filepath.Join(temp, "pgoutbox-pgbouncer-*")); len(found) != 1 || err != nil {
			t.Errorf("its files are in %q (%v)", found, err)
		}
	})
	if !isEmpty(temp) {
		t.Error("its files outlive it")
	}
	if conn, err := net.Dial("tcp", addr); err == nil {
		_ = conn.Close()
		t.Error("it still answers")
	}
}
