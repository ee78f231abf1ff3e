package pgoutbox

import (
	"context"
	"time"
)

// shard is what one lead works with: which of its rows were fetched, are out, and are acked. Its reader's lock guards it.
type shard struct {
	*lead

	reader    *reader
	cursor    *cursor
	queue     *queue
	out       int  // rows given to workers and not settled
	heavy     int  // bytes of large payloads in memory or out
	heldBytes int  // of the payloads that held counts
	held      int  // rows queued with their payload in memory
	runnable  bool // listed in reader.runnable
	gone      bool // lost or given back: nothing it does counts any more

	quarantine

	aside      []*entry        // to be parked, in order
	parkedKeys map[string]bool // whose rows are parked instead of delivered
	freeing    map[string]bool // keys whose rows are coming back; false: and one of them was given up again
	unpark     bool            // parked rows are asked for
	moving     bool            // rows are on their way to or from the parked ones
	moveAgain  time.Time       // not before

	context context.Context // parent of the messages' contexts
	cancel  context.CancelCauseFunc

	movedAt   time.Time // when a row was last acked, or there was none to be, as of a tick
	movedAcks uint64

	savedChanges uint64
	savedAt      position
	savedTime    time.Time
	savedPending int
}

// flight is one delivery of one row.
type flight struct {
	shard *shard
	entry *entry
	prev  *entry // the row of the same key before it in the same run
	record

	single bool // a suspect: no other of the process is out
}

// hold counts a row that waits with its payload in memory.
func (sh *shard) hold(e *entry) {
	sh.held++
	sh.heldBytes += len(e.payload)
}

// The rows of a shard that wait with their payload in memory are bounded in number, and all shards together in bytes; of those
// behind only the ids are kept.
const (
	holdMost  = 2 * pageRows
	holdBytes = 32 << 20
)

// enqueue takes over the next row in emission order.
func (sh *shard) enqueue(e *entry) {
	if e.loaded {
		if sh.held >= holdMost || sh.heldBytes >= holdBytes/max(1, len(sh.reader.shards)) {
			e.loaded, e.payload = false, nil
		} else {
			sh.hold(e)
		}
	}
	sh.queue.push(e)
}

// take hands out up to limit rows, never two of one key side by side: rows of one key follow each other within the run, of
// one topic, and wait together.
func (sh *shard) take(limit, outMost int) []*flight {
	if e, wait := sh.nextSuspect(time.Now()); e != nil {
		return sh.takeAlone(e)
	} else if wait {
		return nil
	}
	limit = min(limit, outMost-sh.out)
	var run []*flight
	for len(run) < limit {
		if next := sh.queue.ready.peek(); next == nil || (next.attempt > 0 && len(run) > 0) {
			break
		}
		e := sh.queue.pop()
		if sh.keptBack(e) {
			continue
		}
		run = append(run, sh.send(e, nil))
		if e.attempt > 1 {
			break // what failed before goes alone, so that a bad row is found out
		}
		for len(run) < limit {
			next := sh.queue.follow(e)
			if next == nil {
				break
			}
			run = append(run, sh.send(next, e))
			e = next
		}
	}
	return run
}

// send marks the row as seen from now on. The flight takes the payload with it: whoever gets the message may change it, so
// another attempt reads the row again.
func (sh *shard) send(e, prev *entry) *flight {
	sh.cursor.emit(e)
	sh.out++
	sh.held--
	sh.heldBytes -= len(e.payload)
	e.attempt++
	f := &flight{shard: sh, entry: e, prev: prev, record: e.record}
	e.loaded, e.payload = false, nil
	return f
}

// row is what the receiver of the flight is told about it.
func (f *flight) row() Row {
	return Row{
		ID: f.id, Shard: f.shard.shard, Term: f.shard.term, Topic: f.topic, Key: f.key, CreatedAt: f.created,
		Attempt: f.entry.attempt,
	}
}

// context is the one of the flight's message. Ended by cancel, it has the cause of the shard's own end if there is one: that end
// wakes whoever waits for the message before it reaches the contexts below.
func (f *flight) context() (ctx context.Context, cancel context.CancelFunc) {
	ctx, end := context.WithCancelCause(&rowContext{Context: f.shard.context, row: f.row(), xid: f.xid})
	return ctx, func() { end(context.Cause(f.shard.context)) }
}

// room is how many more rows the shard may have fetched and not acked.
func (sh *shard) room() int { return sh.reader.window - sh.cursor.unacked }

// hungry reports that the shard will soon have nothing to do and may have more.
func (sh *shard) hungry(low int) bool {
	return !sh.gone && sh.queue.ready.len() < low && sh.room() >= min(pageRows, max(1, sh.reader.window/4))
}

// save returns what should be stored, if anything: soon after work was done, seldom when only the snapshots went on.
func (sh *shard) save(now time.Time, idle time.Duration) (save, bool) {
	worked := sh.cursor.changes != sh.savedChanges
	if !worked && now.Sub(sh.savedTime) < idle {
		return save{}, false
	}
	at, pending := sh.cursor.state()
	if !worked && at.covers(sh.savedAt) {
		return save{}, false
	}
	sh.savedTime = now
	return sh.saveOf(at, pending), true
}

// saveOf is the save of a state that the cursor has, or is about to have.
func (sh *shard) saveOf(at position, pending []int64) save {
	changes := sh.cursor.changes
	return save{lead: sh.lead, at: at, pending: pending, suspect: sh.suspectNow(), stored: sh.savedPending, done: func(v save) {
		sh.reader.mu.Lock()
		defer sh.reader.mu.Unlock()
		sh.savedChanges, sh.savedAt, sh.savedPending = changes, v.at, len(v.pending)
	}}
}
