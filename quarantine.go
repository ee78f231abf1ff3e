package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// quarantine finds the row that ends the process which handles it. With MaxAttempts, a shard whose last leader did not give it
// back has its rows that may have been out then handed out single file: each alone, and only after it is stored, synchronously,
// which one it is. A leader that ends with one row out alone blames that row; at MaxAttempts such ends it is parked.
//
// Rows that were never out wait meanwhile. A row that neither comes back nor ends the process within suspectPatience does not
// hold up the rest: its shard goes on as usual. Rows that may have been out only because the last save did not tell, which are
// many, are suspects no longer than that after the take-over.
type quarantine struct {
	suspects int // rows that may have been out
	more     int // rows fetched next that may have been out too: emitted after the last save
	began    time.Time
	single   *flight // the suspect that is out
	blamed   *entry  // the row that was out alone when the last leader ended
	deaths   int     // how many leaders ended so with it
	waiting  time.Time
}

const (
	suspectMost     = 64 // rows behind the stored position that are suspected
	suspectPatience = 30 * time.Second
)

// isolated lets one suspect of the whole process go out at a time, whichever Subscriber or Bridge it belongs to: with two out,
// nobody could tell which one ended the process.
var isolated isolation

type isolation struct {
	mu      sync.Mutex
	holder  *flight
	waiting map[*reader]bool
}

// take takes the place for f, or notes that r waits for it.
func (s *isolation) take(f *flight, r *reader) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holder != nil {
		s.waiting[r] = true
		return false
	}
	if s.waiting == nil {
		s.waiting = map[*reader]bool{}
	}
	s.holder = f
	return true
}

// free ends f's place, if it has it, and wakes who waits.
func (s *isolation) free(f *flight) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.holder != f {
		return
	}
	s.holder = nil
	for r := range s.waiting {
		r.poke()
	}
	clear(s.waiting)
}

// suspectAfter begins the quarantine of a shard whose last leader ended while rows may have been out.
func (sh *shard) suspectAfter(row stored, pending []*entry) {
	most := sh.reader.maxAttempts
	if most == 0 || row.released || row.owner == sh.of.owner { // ourselves: the process did not end
		return
	}
	for _, e := range pending {
		t := e.troubled()
		if e.id == row.suspect.id && row.suspect.deaths >= most {
			t.hopeless, t.failures, t.since = true, row.suspect.deaths, time.Now()
			t.last = fmt.Sprintf("%d leaders ended while this row alone was out", row.suspect.deaths)
			continue
		}
		if e.id == row.suspect.id {
			sh.blamed, sh.deaths = e, row.suspect.deaths
		}
		t.suspect = true
		sh.suspects++
	}
	sh.more, sh.began = suspectMost, time.Now()
}

// suspectNext suspects a row that was fetched from behind the stored position.
func (sh *shard) suspectNext(e *entry) {
	if sh.more > 0 {
		sh.more--
		t := e.troubled()
		t.suspect, t.behind = true, true
		sh.suspects++
	}
}

// cleared takes a row off the suspects: it came back, or will not go out.
func (sh *shard) cleared(e *entry) {
	if sh.blamed == e {
		sh.blamed = nil
	}
	if e.trouble != nil && e.trouble.suspect {
		e.trouble.suspect = false
		sh.suspects = max(sh.suspects-1, 0)
	}
}

// absolve ends the quarantine: somebody has been waiting for too long.
func (sh *shard) absolve() {
	sh.suspects, sh.more, sh.blamed = 0, 0, nil
	if f := sh.single; f != nil {
		sh.single = nil
		sh.reader.workers.Go(func() { sh.reader.unmark(f) })
	}
}

// nextSuspect returns the row that should go out alone now. Without one, rows that are no suspects may go, unless wait says that
// one is, or is about to be, out.
func (sh *shard) nextSuspect(now time.Time) (e *entry, wait bool) {
	if sh.suspects == 0 {
		return nil, false
	}
	if sh.single == nil {
		if e = sh.readySuspect(now.Sub(sh.began) > suspectPatience); e == nil {
			sh.waiting = time.Time{}
			return nil, sh.blamed != nil && sh.blamed.stage != stageWaiting // its payload is being read
		}
		if sh.out == 0 {
			sh.waiting = time.Time{}
			return e, true
		}
	}
	if sh.waiting.IsZero() {
		sh.waiting = now
	} else if now.Sub(sh.waiting) > suspectPatience {
		sh.absolve()
		return nil, false
	}
	return nil, true
}

func (sh *shard) readySuspect(late bool) *entry {
	if sh.blamed != nil {
		if sh.queue.ready.has(sh.blamed) {
			return sh.blamed
		}
		if sh.blamed.stage != stageWaiting {
			return nil
		}
	}
	for _, e := range sh.queue.ready.rows[sh.queue.ready.head:] {
		if late && e.trouble != nil && e.trouble.behind {
			sh.cleared(e)
		}
		if e.trouble != nil && (e.trouble.suspect || e.trouble.hopeless) {
			return e
		}
	}
	return nil
}

// takeAlone hands out one suspect, if no other is out anywhere.
func (sh *shard) takeAlone(e *entry) []*flight {
	f := &flight{shard: sh, entry: e}
	if !isolated.take(f, sh.reader) {
		return nil
	}
	sh.queue.take(e)
	if sh.keptBack(e) {
		isolated.free(f)
		return nil
	}
	*f = *sh.send(e, nil)
	f.single, sh.single = true, f
	return []*flight{f}
}

// suspectNow is what a save says of the shard.
func (sh *shard) suspectNow() suspect {
	switch {
	case sh.single != nil && sh.single.entry == sh.blamed:
		return suspect{sh.blamed.id, sh.deaths + 1}
	case sh.single != nil:
		return suspect{sh.single.id, 1}
	case sh.blamed != nil:
		return suspect{sh.blamed.id, sh.deaths}
	default:
		return suspect{}
	}
}

// mark stores which row is about to go out alone. False: it must not go.
func (r *reader) mark(f *flight) bool {
	sh := f.shard
	stored, err := r.storeMark(sh)
	switch {
	case stored:
		return true
	case sh.context.Err() != nil:
		r.abandoned(f)
	default:
		r.failed(f, errors.Join(errors.New("the row was not stored as the one that is out"), err), false)
	}
	return false
}

// unmark ends the turn of a row that was out alone. The place is free only when the row is no longer stored as the one that is
// out: it would be blamed for what the next suspect, of another shard, does to the process.
func (r *reader) unmark(f *flight) {
	sh := f.shard
	for sh.context.Err() == nil {
		if stored, err := r.storeMark(sh); stored || errors.Is(err, ErrClosed) {
			break
		}
		pause(sh.context, jitter(moveRetry))
	}
	isolated.free(f)
}

func (r *reader) storeMark(sh *shard) (bool, error) {
	return do(sh.context, r.leadership, true, func(ctx context.Context, s *session) (bool, error) {
		r.mu.Lock()
		v := sh.saveOf(sh.cursor.state())
		r.mu.Unlock()
		return r.leadership.storeDurably(ctx, s, v)
	})
}

// quarantined looks after shards in quarantine, whose workers may wait for something that only time brings.
func (r *reader) quarantined() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, sh := range r.shards {
		if sh.suspects > 0 {
			r.again = min(r.again, time.Second)
			r.offer(sh)
		}
	}
}
