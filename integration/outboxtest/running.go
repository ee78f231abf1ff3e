package outboxtest

import (
	"context"
	"testing"
	"time"
)

// Running is a blocking Run in a goroutine: a bridge's, a leader's.
type Running struct {
	t    testing.TB
	stop context.CancelFunc
	done chan error // holds what Run returned, for everybody who waits
}

// Run starts run, which goes on until it is stopped, at the latest when the test ends, and must then return nil.
func Run(t testing.TB, run func(context.Context) error) *Running {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context())) // the test's own ends before its clean-up
	r := &Running{t: t, stop: stop, done: make(chan error, 1)}
	go func() { r.done <- run(ctx) }() // Ended waits
	t.Cleanup(r.End)
	return r
}

// Stop asks it to stop, and does not wait.
func (r *Running) Stop() { r.stop() }

// End stops it and waits until it has returned. It may be called again.
func (r *Running) End() {
	r.t.Helper()
	r.stop()
	r.Ended()
}

// Ended waits until it returns by itself, which must be with nil. It may be called again.
func (r *Running) Ended() {
	r.t.Helper()
	late := time.NewTimer(Patience)
	defer late.Stop()
	select {
	case err := <-r.done:
		r.done <- err
		if err != nil {
			r.t.Errorf("Run returned %v", err)
		}
	case <-late.C:
		r.t.Error("Run does not return")
	}
}
