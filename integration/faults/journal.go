package faults

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Journal keeps what was delivered. It is safe for concurrent use.
type Journal struct {
	mu      sync.Mutex
	lines   []Delivery
	changed chan struct{} // closed, and replaced, by every delivery
}

// NewJournal makes an empty one.
func NewJournal() *Journal { return &Journal{changed: make(chan struct{})} }

// Add appends a delivery.
func (j *Journal) Add(d Delivery) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.lines = append(j.lines, d)
	close(j.changed)
	j.changed = make(chan struct{})
}

// All returns what there is.
func (j *Journal) All() []Delivery {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.lines)
}

// Of returns the deliveries that fit.
func (j *Journal) Of(fits func(Delivery) bool) []Delivery {
	return slices.DeleteFunc(j.All(), func(d Delivery) bool { return !fits(d) })
}

// Wait returns the first delivery that fits, waiting for it until ctx ends.
func (j *Journal) Wait(ctx context.Context, fits func(Delivery) bool) (Delivery, error) {
	for seen := 0; ; {
		j.mu.Lock()
		lines, changed := j.lines, j.changed // only appended to
		j.mu.Unlock()
		if i := slices.IndexFunc(lines[seen:], fits); i >= 0 {
			return lines[seen+i], nil
		}
		seen = len(lines)
		select {
		case <-changed:
		case <-ctx.Done():
			return Delivery{}, context.Cause(ctx)
		}
	}
}

// Delivery is one row in the hands of a child's handler or publisher.
type Delivery struct {
	At    time.Time // by the child, when it had the row
	PID   int
	Shard int
	Term  int64
	ID    int64
	Key   string
}
