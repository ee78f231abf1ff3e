package outboxtest

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"
)

// Record keeps events in the order in which they were added, and wakes who waits for one. Its zero value is empty and ready; it
// is safe for concurrent use and must not be copied.
type Record[E any] struct {
	mu   sync.Mutex
	all  []E
	more chan struct{} // closed, and replaced, by every Add; nil before the first who waits
}

// Add appends an event.
func (r *Record[E]) Add(e E) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, e)
	if r.more != nil {
		close(r.more)
		r.more = nil
	}
}

// All returns the events so far, in order.
func (r *Record[E]) All() []E {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

// Of returns those that fit, in order.
func (r *Record[E]) Of(fits func(E) bool) []E {
	return slices.DeleteFunc(r.All(), func(e E) bool { return !fits(e) })
}

// Await waits until ready says yes, or fails the test with what else it said. It is asked after every Add, with all events; it
// must not keep or change them.
func (r *Record[E]) Await(t testing.TB, within time.Duration, ready func(all []E) (yes bool, seen string)) {
	t.Helper()
	late := time.NewTimer(within)
	defer late.Stop()
	for {
		all, more := r.look()
		yes, seen := ready(all)
		if yes {
			return
		}
		select {
		case <-more:
		case <-late.C:
			t.Fatalf("not within %s: %s", within, seen)
			return
		}
	}
}

// Wait returns the first event that fits, waiting for it until ctx ends.
func (r *Record[E]) Wait(ctx context.Context, fits func(E) bool) (first E, err error) {
	for seen := 0; ; {
		all, more := r.look()
		if i := slices.IndexFunc(all[seen:], fits); i >= 0 {
			return all[seen+i], nil
		}
		seen = len(all)
		select {
		case <-more:
		case <-ctx.Done():
			return first, context.Cause(ctx)
		}
	}
}

// look returns the events, which are only appended to, and what the next one closes.
func (r *Record[E]) look() ([]E, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.more == nil {
		r.more = make(chan struct{})
	}
	return slices.Clip(r.all), r.more
}
