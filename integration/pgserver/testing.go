package pgserver

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"
)

var shared struct {
	once   sync.Once
	server *Server
	err    error
}

// Run runs the tests of a package, stops the shared server and looks for goroutines that the tests left behind, which makes
// the run fail unless allowed knows them. It returns the exit code, for TestMain to exit with.
func Run(m *testing.M, allowed ...goleak.Option) int {
	code := m.Run()
	if shared.server != nil {
		if err := shared.server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = max(code, 1)
		}
	}
	if code != 0 {
		return code // a failed test seldom cleans up; its own message matters more
	}
	if err := goleak.Find(allowed...); err != nil {
		fmt.Fprintln(os.Stderr, "pgserver: goroutines outlive the tests:", err)
		return 1
	}
	return 0
}

// Shared is the server of this test process, started by the first test that asks and stopped by Run. Without a server it
// fails the test with what to install.
func Shared(t testing.TB) *Server {
	t.Helper()
	shared.once.Do(func() {
		// Long enough for a first pull of the image; each provider has shorter limits of its own.
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
		defer cancel()
		shared.server, shared.err = Start(ctx, Options{Logf: t.Logf})
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.server
}

// Database creates a database on the shared server, drops it when the test ends and returns its connection string.
func Database(t testing.TB) string {
	t.Helper()
	return Shared(t).Database(t)
}

// Pool opens a pool on dsn, after mod has changed its configuration, and closes it when the test ends. A connection that is
// still out by then fails the test.
func Pool(t testing.TB, dsn string, mod ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range mod {
		m(cfg)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() { // has no owner when it hangs, but then the test has failed
			defer close(closed)
			pool.Close()
		}()
		select {
		case <-closed:
		case <-time.After(10 * time.Second):
			t.Errorf("%d connections of the pool were never given back", pool.Stat().AcquiredConns())
		}
	})
	return pool
}
