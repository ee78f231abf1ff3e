// Package cases_test repeats faults that people met in systems of this kind, one case a file. docs/cases.md lists them.
//
// The words that the tests share: an [outbox] is a database of its own with writers that remember what committed, a [sink] is
// the log of what was delivered, a [reader] is a Subscriber in this process and a [child] one in a process that can be
// killed. [outbox.judge] compares the two at the end.
//
// Long waits are cut to 5 s and rounds to a tenth, unless PGOUTBOX_TEST_FULL is set, as `make cases` does.
package cases_test

import (
	"flag"
	"os"
	"runtime"
	"strconv"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
	"github.com/pgoutbox/watermill-pgoutbox/integration/torture"
)

func TestMain(m *testing.M) {
	if code, isChild := torture.Child(children); isChild {
		os.Exit(code)
	}
	flag.Parse()
	boundParallel()
	os.Exit(pgserver.Run(m))
}

// boundParallel lets twice as many cases run side by side as there are processors, because most of them wait most of the time.
func boundParallel() {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if !given {
		_ = flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0)))
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
