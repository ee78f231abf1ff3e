package pgoutbox

import (
	"time"
)

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
		if f := run[0]; f.single {
			if r.mark(f) {
				r.sink(run)
			}
			r.unmark(f)
			continue
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
		if len(run) > 0 && sh.queue.ready.len() > 0 && sh.out < r.outMost { // none: it waits in quarantine
			sh.runnable = true
			r.runnable = append(r.runnable, sh)
		}
		if sh.queue.ready.len() == 0 || sh.hungry(max(pageRows/2/len(r.shards), 32)) {
			r.poke()
		}
		if len(sh.aside) > 0 {
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

// failed ends a delivery that must be repeated, or given up. The key waits for a while; other keys go on. A failure of several
// rows together, of which nobody knows whose it was, does not count towards MaxAttempts.
func (r *reader) failed(f *flight, err error, alone bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leave(f)
	if f.shard.gone || r.ended {
		return
	}
	sh, e := f.shard, f.entry
	if alone {
		e.troubled().note(err)
		if r.givesUp(e, err) {
			sh.giveUp(e)
			r.next(sh)
			r.poke()
			return
		}
	}
	sh.queue.delay(e)
	time.AfterFunc(r.backOff(e.attempt), func() {
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
		f.shard.queue.rejoin(f.entry)
		r.next(f.shard) // the row before it may be done with already
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
	f.shard.cleared(f.entry)
	if f.shard.single == f {
		f.shard.single = nil
	}
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

// backOff is the delay before attempt number attempt+1: doubling, with jitter, bounded.
func (r *reader) backOff(attempt int) time.Duration {
	d := r.nackDelay << min(attempt-1, 30)
	if d <= 0 || d > r.nackMost {
		d = r.nackMost
	}
	return jitter(d)
}
