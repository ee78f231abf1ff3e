package outboxtest

import (
	"context"
	"testing"
	"time"
)

// Patience is how long a test waits for an event before it fails; never how long it takes.
const Patience = time.Minute

// Eventually asks until the answer is yes, or fails the test with what was seen last.
func Eventually(t testing.TB, within time.Duration, what string, ask func() (yes bool, seen string)) {
	t.Helper()
	late := time.NewTimer(within)
	defer late.Stop()
	again := time.NewTicker(10 * time.Millisecond)
	defer again.Stop()
	for {
		yes, seen := ask()
		if yes {
			return
		}
		select {
		case <-again.C:
		case <-late.C:
			t.Fatalf("not within %s: %s; last seen: %s", within, what, seen)
			return
		}
	}
}

// Next receives from a channel, or fails the test. A closed channel gives the zero value.
func Next[E any](t testing.TB, what string, from <-chan E) (e E) {
	t.Helper()
	late := time.NewTimer(Patience)
	defer late.Stop()
	select {
	case e = <-from:
	case <-late.C:
		t.Fatalf("not within %s: %s", Patience, what)
	}
	return e
}

// Pause waits where a test is about a length of time: nothing may happen meanwhile, or a promised time must pass.
func Pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
