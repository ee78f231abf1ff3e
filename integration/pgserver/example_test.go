//go:build unix

package pgserver_test

import (
	"os"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func ExampleRun() {
	testMain := func(m *testing.M) { // called TestMain in your package
		os.Exit(pgserver.Run(m))
	}
	_ = testMain
}

func ExampleDatabase() {
	testSomething := func(t *testing.T) {
		pool := pgserver.Pool(t, pgserver.Database(t))
		if err := pool.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	_ = testSomething
}
