package pgoutbox

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// reader serves one consumer: it fetches the rows of the shards that this process leads, hands them to workers in an order
// that keeps keys in theirs, and follows their acks. Who receives them, a Watermill channel or a Publisher, is the sink's
// affair.
//
// One goroutine, run, decides what to read next and reads it; workers take rows and settle them. What they share is behind
// mu, which nobody holds across I/O or a call into leadership.
type reader struct {
	readerConfig

	leadership *leadership
	fetcher    *fetcher
	wakeup     chan struct{} // capacity 1: something may be possible now that was not
	stopping   chan struct{} // closed: nothing further is emitted
	drained    chan struct{} // closed: and nothing is out
	workers    sync.WaitGroup

	mu       sync.Mutex
	idle     sync.Cond // workers wait here for rows
	shards   map[int]*shard
	won      []won // shards that were led and are not yet served
	tick     tick
	runnable []*shard // have rows that may go out
	staff    int      // workers that exist
	waiting  int      // of these, idle ones
	stopped  bool
	ended    bool
	allSaved time.Time // when every shard was last looked at for a save, idle or not

	scans []*scan       // run's own
	again time.Duration // run's own: look again after so long, whatever happens
}

type readerConfig struct {
	ordering  Ordering
	window    int
	outMost   int // rows of a shard that may be out
	staffMost func(shards int) int
	runMost   func(ready, shards int) int // rows that one worker takes at a time
	sink      func([]*flight)             // delivers rows and settles each; runs on a worker
	liveOnly  bool
	nackDelay time.Duration
	nackMost  time.Duration

	maxAttempts int // 0 = rows are repeated for ever
	parkPolicy  ParkPolicy

	name         string        // of what is read, for people
	stalledAfter time.Duration // rows and no ack for so long are unhealthy

	values context.Context // whose values the messages' contexts carry
	report reporter
}

type won struct {
	lead *lead
	row  stored
}

const idleSave = time.Minute // between saves of a consumer that has nothing to do

func newReader(cfg readerConfig, g *leadership, f *fetcher) *reader {
	r := &reader{
		readerConfig: cfg, leadership: g, fetcher: f,
		wakeup: make(chan struct{}, 1), stopping: make(chan struct{}), drained: make(chan struct{}),
		shards: map[int]*shard{},
	}
	r.idle.L = &r.mu
	return r
}

// led, ticked and saves make the reader a follower.
func (r *reader) led(l *lead, row stored) {
	r.mu.Lock()
	r.won = append(r.won, won{l, row})
	r.mu.Unlock()
	r.poke()
}

func (r *reader) ticked(t tick) {
	r.mu.Lock()
	r.tick = t
	r.moved(time.Now())
	r.mu.Unlock()
	r.poke()
}

func (r *reader) saves(now time.Time) []save { return r.collectSaves(now, idleSave) }

func (r *reader) collectSaves(now time.Time, idle time.Duration) []save {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now.Sub(r.allSaved) >= idle { // all together: each at its own time, they would draw a transaction id each
		r.allSaved, idle = now, 0
	}
	var out []save
	for _, sh := range r.shards {
		if v, ok := sh.save(now, idle); ok && !sh.gone {
			out = append(out, v)
		}
	}
	return out
}

func (r *reader) poke() {
	select {
	case r.wakeup <- struct{}{}:
	default:
	}
}

// run reads until ctx ends. It survives every error of the database.
func (r *reader) run(ctx context.Context) {
	var wait time.Duration
	failing := false
	defer func() { r.leadership.wrong(r.name, nil) }()
	for ctx.Err() == nil {
		worked, err := r.round(ctx)
		if err == nil && failing {
			failing = false
			r.leadership.wrong(r.name, nil)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.report.failed("reading was interrupted, it is tried again", err, nil)
			r.leadership.wrong(r.name, err)
			failing = true
			wait = min(max(2*wait, 50*time.Millisecond), time.Second)
			pause(ctx, wait)
		case worked:
			wait = 0
		default:
			wait = 0
			r.rest(ctx)
		}
	}
}

// rest waits until something may be possible that was not.
func (r *reader) rest(ctx context.Context) {
	timer := time.NewTimer(r.again)
	defer timer.Stop()
	select {
	case <-r.wakeup:
	case <-timer.C:
	case <-ctx.Done():
	}
}

// round does everything that is possible now, one page for each scan at most, and reports whether there may be more.
func (r *reader) round(ctx context.Context) (bool, error) {
	r.again = time.Hour
	r.forget()
	r.bringBack()
	r.park()
	r.quarantined()
	if err := r.admit(ctx); err != nil {
		return false, err
	}
	worked, err := r.reload(ctx)
	if err != nil {
		return false, err
	}
	r.advance()
	for _, sc := range slices.Clone(r.scans) {
		limit := r.wants(sc)
		if limit == 0 {
			continue
		}
		p, err := sc.fetch(ctx, r.fetcher, limit)
		if err != nil {
			return false, fmt.Errorf("read consumer %d: %w", r.fetcher.consumer.id, err)
		}
		r.deliver(sc, p)
		worked = true
		if sc.at.atEnd() && sc.found {
			r.leadership.hurry() // where rows came from, more may have come
		}
	}
	return worked, nil
}

// placeReplica tells the replica how far it must be. A tick that is older than a lead says nothing about what the leader before has
// stored, so the primary serves until the next. mu is held.
func (r *reader) placeReplica(waiting []won) {
	if r.fetcher.replica == nil {
		return
	}
	position := r.tick.position
	for _, w := range waiting {
		if r.tick.n <= w.lead.born {
			position = ""
		}
	}
	for _, sh := range r.shards {
		if r.tick.n <= sh.born {
			position = ""
		}
	}
	r.fetcher.replica.position = position
}

// stop ends emission. What is out stays out until it is settled.
func (r *reader) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return
	}
	r.stopped = true
	close(r.stopping)
	r.idle.Broadcast()
	r.checkDrained()
}

// end gives up what is still out: contexts of messages end, and workers return. A Publisher that does not return when the
// contexts of its messages have ended is not waited for.
func (r *reader) end(cause error) {
	r.mu.Lock()
	r.ended = true
	for _, sh := range r.shards {
		sh.cancel(cause)
	}
	r.idle.Broadcast()
	r.mu.Unlock()
	gone := make(chan struct{})
	go func() { // outlives end only in that case, and then as long as that Publish
		defer close(gone)
		r.workers.Wait()
	}()
	timer := time.NewTimer(endTimeout)
	defer timer.Stop()
	select {
	case <-gone:
	case <-timer.C:
		r.report.failed("a call of Publish goes on after its messages' contexts ended", cause, nil)
	}
}

const endTimeout = 300 * time.Millisecond
