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
	done chan struct{} // closed when it has returned
	err  error         // what it returned
}

// Run starts run, which goes on until it is stopped, at the latest when the test ends, and must then return nil.
func Run(t testing.TB, run func(context.Context) error) *Running {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context())) // the test's own ends before its clean-up
	r := &Running{t: t, stop: stop, done: make(chan struct{})}
	go func() { // Ended waits
		defer close(r.done)
		r.err = run(ctx)
	}()
	t.Cleanup(r.End)
	return r
}

// Stop asks it to stop, and does not wait.
func (r *Running) Stop() { r.stop() }

// Done is closed when it has returned.
func (r *Running) Done() <-chan struct{} { return r.done }

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
	case <-r.done:
		if r.err != nil {
			r.t.Errorf("Run returned %v", r.err)
		}
	case <-late.C:
		r.t.Error("Run does not return")
	}
}
