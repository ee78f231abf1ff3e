// Package cases_test repeats faults that people met in systems of this kind, one case a file. docs/cases.md lists them.
//
// The words that the tests share: an [outbox] is a database of its own with writers that remember what committed, a [sink] is
// the log of what was delivered, a [reader] is a Subscriber in this process and a [child] one in a process that can be
// killed. [outbox.judge] compares the two at the end.
//
// Long waits are cut to 5 s and rounds to a tenth, unless PGOUTBOX_TEST_FULL is set, as `make cases` does.
package cases_test

import (
	"context"
	"flag"
	"os"
	"runtime"
	"strconv"
	"testing"
	"time"

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

func full() bool { return os.Getenv("PGOUTBOX_TEST_FULL") != "" }

// length is how long a wait of the full run takes in this one.
func length(d time.Duration) time.Duration {
	if full() || d < 30*time.Second {
		return d
	}
	return 5 * time.Second
}

// rounds is how many rounds of the full run this one makes.
func rounds(n int) int {
	if full() {
		return n
	}
	return max(n/10, 5)
}

// pause waits where a case says how long something takes.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// eventually asks until the answer is yes, or fails the test with what was seen last.
func eventually(t testing.TB, within time.Duration, what string, ask func() (bool, string)) {
	t.Helper()
	deadline := time.NewTimer(within)
	defer deadline.Stop()
	again := time.NewTicker(20 * time.Millisecond)
	defer again.Stop()
	for {
		ok, seen := ask()
		if ok {
			return
		}
		select {
		case <-again.C:
		case <-deadline.C:
			t.Fatalf("%s: not within %s; last seen: %s", what, within, seen)
		}
	}
}
