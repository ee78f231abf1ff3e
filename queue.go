package pgoutbox

import "slices"

// queue decides which row of a shard may go out next: rows of one key one at a time and in order, rows without a key as
// they come. It holds no row twice and asks nobody; its owner guards it.
type queue struct {
	oneLane bool             // every row counts as one key
	lanes   map[string]*lane // the rows of each key that has any in the queue or out
	ready   fifo             // may go out now
	unread  fifo             // could go out, but their payload must be read again first
	waiting int              // queued, neither ready nor unread nor out: behind a row of their key, or delayed
}

// lane is the rows of one key that are not done with, in order, linked by behind. Those that are out come first.
type lane struct{ first, last *entry }

// stage is where a row stands in its queue.
type stage uint8

const (
	stageWaiting stage = iota // behind a row of its key
	stageTurn                 // its turn has come: ready or unread
	stageReading
	stageOut
	stageDelayed
)

func newQueue(o Ordering) *queue {
	return &queue{oneLane: o == OrderByShard, lanes: map[string]*lane{}}
}

// laneOf is what e must stay in order with; false: nothing.
func (q *queue) laneOf(e *entry) (string, bool) {
	if q.oneLane {
		return "", true
	}
	return e.key, e.hasKey
}

// push queues the next row.
func (q *queue) push(e *entry) {
	key, ordered := q.laneOf(e)
	if !ordered {
		q.release(e)
		return
	}
	l, held := q.lanes[key]
	if !held {
		q.lanes[key] = &lane{first: e, last: e}
		q.release(e)
		return
	}
	l.last.behind = e
	l.last = e
	q.wait(e)
}

// insert queues a row that belongs before others of its key: behind those that are out, and before the first of a higher id.
func (q *queue) insert(e *entry) {
	key, ordered := q.laneOf(e)
	l, held := q.lanes[key]
	if !ordered || !held {
		q.push(e)
		return
	}
	var before *entry
	next := l.first
	for next != nil && (next.stage == stageOut || next.id < e.id) {
		before, next = next, next.behind
	}
	e.behind = next
	if next == nil {
		l.last = e
	}
	if before != nil {
		before.behind = e
		q.wait(e)
		return
	}
	l.first = e
	if next.stage == stageTurn {
		q.ready.remove(next)
		q.unread.remove(next)
		q.wait(next)
	}
	q.release(e)
}

func (q *queue) wait(e *entry) {
	e.stage = stageWaiting
	q.waiting++
}

// pop hands out a row, nil when none may go. The rows behind it wait until done or again.
func (q *queue) pop() *entry { return q.out(q.ready.pop()) }

// take hands out a row that is ready, from wherever it stands among them.
func (q *queue) take(e *entry) {
	q.ready.remove(e)
	q.out(e)
}

func (q *queue) out(e *entry) *entry {
	if e != nil {
		e.stage = stageOut
	}
	return e
}

// popUnread hands out a row whose payload must be read again, nil when there is none. release gives it back.
func (q *queue) popUnread() *entry {
	e := q.unread.pop()
	if e != nil {
		e.stage = stageReading
	}
	return e
}

// release makes e ready, or unread while its payload is missing; if insert put another row before it, it waits for that one.
func (q *queue) release(e *entry) {
	if key, ordered := q.laneOf(e); ordered && q.lanes[key].first != e {
		q.wait(e)
		return
	}
	e.stage = stageTurn
	if e.loaded {
		q.ready.push(e)
	} else {
		q.unread.push(e)
	}
}

// done ends e's turn; the next row of its key is free to go.
func (q *queue) done(e *entry) {
	key, ordered := q.laneOf(e)
	if !ordered {
		return
	}
	l, next := q.lanes[key], e.behind
	e.behind = nil
	if l.first != e { // found deleted while it was read, and another was inserted before it
		l.unlink(e, next)
		return
	}
	if next == nil {
		delete(q.lanes, key)
		return
	}
	l.first = next
	if next.stage == stageWaiting {
		q.waiting--
		q.release(next)
	}
}

// unlink takes e, which is not the first, out of the chain.
func (l *lane) unlink(e, next *entry) {
	before := l.first
	for before.behind != e {
		before = before.behind
	}
	before.behind = next
	if next == nil {
		l.last = before
	}
}

// follow hands out the row right behind e, to go out together with it: nil unless it is here and of the same topic. From
// then on each of the two is done on its own, in order; rejoin undoes it.
func (q *queue) follow(e *entry) *entry {
	next := e.behind
	if next == nil || next.stage != stageWaiting || !next.loaded || next.topic != e.topic {
		return nil
	}
	q.waiting--
	return q.out(next)
}

// rejoin takes back a row that follow handed out. It waits for the one before it, unless that is done with by now.
func (q *queue) rejoin(e *entry) { q.release(e) }

// delay takes e's turn from it without ending it: its key waits. resume gives the turn back.
func (q *queue) delay(e *entry) {
	e.stage = stageDelayed
	q.waiting++
}

// resume is release for a row that was delayed.
func (q *queue) resume(e *entry) {
	q.waiting--
	q.release(e)
}

// undelay ends the turn of a row that was delayed.
func (q *queue) undelay(e *entry) {
	q.waiting--
	q.done(e)
}

// fifo is a queue of rows that reuses its memory.
type fifo struct {
	rows []*entry
	head int
}

func (f *fifo) push(e *entry) {
	if f.head > 64 && f.head*2 >= len(f.rows) {
		n := copy(f.rows, f.rows[f.head:])
		clear(f.rows[n:])
		f.rows, f.head = f.rows[:n], 0
	}
	f.rows = append(f.rows, e)
}

func (f *fifo) pop() *entry {
	if f.head == len(f.rows) {
		return nil
	}
	e := f.rows[f.head]
	f.rows[f.head] = nil
	f.head++
	if f.head == len(f.rows) {
		f.rows, f.head = f.rows[:0], 0
	}
	return e
}

// remove takes a row out of the middle. It looks through everything, which is fine for what is rare.
func (f *fifo) remove(e *entry) {
	i := slices.Index(f.rows[f.head:], e)
	if i < 0 {
		return
	}
	f.rows = slices.Delete(f.rows, f.head+i, f.head+i+1)
	if f.head == len(f.rows) {
		f.rows, f.head = f.rows[:0], 0
	}
}

func (f *fifo) has(e *entry) bool { return slices.Contains(f.rows[f.head:], e) }

// peek returns what pop would, nil when there is nothing.
func (f *fifo) peek() *entry {
	if f.head == len(f.rows) {
		return nil
	}
	return f.rows[f.head]
}

func (f *fifo) len() int { return len(f.rows) - f.head }
