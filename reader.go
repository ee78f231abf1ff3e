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
	claim      *claim
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

	scans []*scan // run's own
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
	values    context.Context // whose values the messages' contexts carry
	report    reporter
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
	var pause time.Duration
	for ctx.Err() == nil {
		worked, err := r.round(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			r.report.failed("reading was interrupted, it is tried again", err, nil)
			pause = min(max(2*pause, 50*time.Millisecond), 2*time.Second)
			r.sleep(ctx, pause)
		case worked:
			pause = 0
		default:
			pause = 0
			select {
			case <-r.wakeup:
			case <-ctx.Done():
			}
		}
	}
}

func (r *reader) sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// round does everything that is possible now, one page for each scan at most, and reports whether there may be more.
func (r *reader) round(ctx context.Context) (bool, error) {
	r.forget()
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

// forget drops the shards that are no longer led.
func (r *reader) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for number, sh := range r.shards {
		if sh.gone {
			delete(r.shards, number)
		}
	}
	r.scans = slices.DeleteFunc(r.scans, func(sc *scan) bool {
		sc.shards = slices.DeleteFunc(sc.shards, func(sh *shard) bool { return sh.gone })
		return len(sc.shards) == 0
	})
}

// advance gives every scan that read its batch to the end the next one, and lets scans that stand at the same place go on
// as one.
func (r *reader) advance() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.merge()
	for _, sc := range r.scans {
		if !sc.at.atEnd() {
			continue
		}
		if sc.ticked >= r.tick.n {
			continue
		}
		sc.ticked = r.tick.n
		next := batch{after: sc.at.batch.upto, upto: r.tick.snapshot}
		if next.quiet(r.tick.stray) {
			continue
		}
		sc.begin(r.tick.snapshot)
		for _, sh := range sc.shards {
			sh.cursor.reach(sc.at)
		}
	}
}

func (r *reader) merge() {
	for i := 0; i < len(r.scans); i++ {
		for j := len(r.scans) - 1; j > i; j-- {
			one, other := r.scans[i], r.scans[j]
			if one.sameAs(other) {
				one.shards = append(one.shards, other.shards...)
				one.ticked = min(one.ticked, other.ticked)
				r.scans = slices.Delete(r.scans, j, j+1)
			}
		}
	}
}

// wants returns how many rows the scan should fetch now, 0 when its shards have enough to do or no room.
func (r *reader) wants(sc *scan) int {
	if sc.at.atEnd() {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	low := max(pageRows/2/len(sc.shards), 32)
	if !slices.ContainsFunc(sc.shards, func(sh *shard) bool { return sh.hungry(low) }) {
		return 0
	}
	if len(sc.shards) == 1 {
		return min(pageRows, sc.shards[0].room())
	}
	return min(pageRows, max(1, r.window*len(sc.shards)/2))
}

// deliver queues a page. A shard that has no room for its part of it leaves the scan and stays where it was: it must not hold
// the others back.
func (r *reader) deliver(sc *scan, p page) {
	r.mu.Lock()
	defer r.mu.Unlock()
	parts := make(map[int][]*entry, len(sc.shards))
	for _, e := range p.rows {
		number := e.slot % r.fetcher.consumer.shards
		parts[number] = append(parts[number], e)
	}
	from := sc.at
	sc.at = p.to
	sc.found = sc.found || len(p.rows) > 0
	sc.shards = slices.DeleteFunc(sc.shards, func(sh *shard) bool {
		part, room := parts[sh.shard], max(0, sh.room())
		full := len(part) > room
		to := p.to
		if full {
			to, part = from, part[:room]
		}
		for _, e := range part {
			sh.cursor.add(e, p.to.batch)
			sh.enqueue(e)
			if full {
				to = position{p.to.batch, e.id}
			}
		}
		sh.cursor.reach(to)
		r.offer(sh)
		if full && !sh.gone {
			r.scans = append(r.scans, &scan{at: to, shards: []*shard{sh}, ticked: sc.ticked, found: true})
		}
		return full
	})
	if len(sc.shards) == 0 {
		r.scans = slices.DeleteFunc(r.scans, func(other *scan) bool { return other == sc })
	}
}

// offer tells the workers about the rows of a shard that may go out. mu is held.
func (r *reader) offer(sh *shard) {
	ready := sh.queue.ready.len()
	if ready == 0 || sh.gone || r.stopped || sh.out >= r.outMost {
		return
	}
	if !sh.runnable {
		sh.runnable = true
		r.runnable = append(r.runnable, sh)
	}
	most := r.staffMost(len(r.shards))
	for range min(ready, r.outMost-sh.out) {
		switch {
		case r.waiting > 0:
			r.waiting-- // counted down here: a worker that was called and has not come yet is not idle
			r.idle.Signal()
		case r.staff < most:
			r.staff++
			r.workers.Go(r.work)
		default:
			return
		}
	}
}

// work takes rows and has them delivered until the reader stops.
func (r *reader) work() {
	for {
		run := r.take()
		if run == nil {
			return
		}
		r.sink(run)
	}
}

// take waits for rows that may go out; nil: there will be none.
func (r *reader) take() []*flight {
	r.mu.Lock()
	defer r.mu.Unlock()
	for {
		if r.stopped {
			r.staff--
			return nil
		}
		if run := r.takeFrom(); run != nil {
			return run
		}
		r.waiting++
		r.idle.Wait()
	}
}

func (r *reader) takeFrom() []*flight {
	for len(r.runnable) > 0 {
		sh := r.runnable[0]
		r.runnable = r.runnable[1:]
		sh.runnable = false
		if sh.gone || !sh.trusted() {
			continue
		}
		run := sh.take(r.runMost(sh.queue.ready.len(), len(r.shards)), r.outMost)
		if sh.queue.ready.len() > 0 && sh.out < r.outMost {
			sh.runnable = true
			r.runnable = append(r.runnable, sh)
		}
		if sh.queue.ready.len() == 0 || sh.hungry(max(pageRows/2/len(r.shards), 32)) {
			r.poke()
		}
		if len(run) > 0 {
			return run
		}
	}
	return nil
}

// settled ends a delivery: the row is done with.
func (r *reader) settled(f *flight) {
	r.mu.Lock()
	r.leave(f)
	if !f.shard.gone {
		f.shard.cursor.ack(f.entry)
		f.shard.queue.done(f.entry)
		r.next(f.shard)
	}
	r.mu.Unlock()
	r.leadership.touch()
}

// failed ends a delivery that must be repeated. Its key waits for delay; other keys go on.
func (r *reader) failed(f *flight, delay time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leave(f)
	if f.shard.gone || r.ended {
		return
	}
	f.shard.queue.delay(f.entry)
	sh, e := f.shard, f.entry
	time.AfterFunc(delay, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !sh.gone && !r.ended {
			sh.queue.resume(e)
			r.next(sh)
		}
	})
	r.next(sh)
}

// returned ends a delivery that did not take place, because the row before it of the same key failed: it goes back behind it.
func (r *reader) returned(f *flight) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leave(f)
	if !f.shard.gone {
		f.shard.queue.rejoin(f.prev, f.entry)
	}
}

// abandoned ends a delivery that nobody will settle: leadership was lost or the time to finish is over. The row stays
// pending.
func (r *reader) abandoned(f *flight) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leave(f)
}

// leave takes a delivery off the count. mu is held.
func (r *reader) leave(f *flight) {
	f.shard.out--
	if f.size > inlineLimit {
		f.shard.heavy -= f.size
		r.poke()
	}
	r.checkDrained()
}

// next looks at what became possible for a shard. mu is held.
func (r *reader) next(sh *shard) {
	r.offer(sh)
	if sh.queue.unread.len() > 0 || sh.queue.ready.len() == 0 {
		r.poke()
	}
}

func (r *reader) checkDrained() {
	if !r.stopped {
		return
	}
	for _, sh := range r.shards {
		if sh.out > 0 && !sh.gone {
			return
		}
	}
	select {
	case <-r.drained:
	default:
		close(r.drained)
	}
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

// backOff is the delay before attempt number attempt+1: doubling, with jitter, bounded.
func (r *reader) backOff(attempt int) time.Duration {
	d := r.nackDelay << min(attempt-1, 30)
	if d <= 0 || d > r.nackMost {
		d = r.nackMost
	}
	return jitter(d)
}
