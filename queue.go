package pgoutbox

// queue decides which row of a shard may go out next: rows of one key one at a time and in order, rows without a key as
// they come. It holds no row twice and asks nobody; its owner guards it.
type queue struct {
	oneLane bool              // every row counts as one key
	last    map[string]*entry // the last row queued of each key that has one in the queue or out
	ready   fifo              // may go out now
	unread  fifo              // could go out, but their payload must be read again first
	waiting int               // queued, neither ready nor unread nor out: behind a row of their key, or delayed
}

func newQueue(o Ordering) *queue {
	return &queue{oneLane: o == OrderByShard, last: map[string]*entry{}}
}

// lane is what e must stay in order with; false: nothing.
func (q *queue) lane(e *entry) (string, bool) {
	if q.oneLane {
		return "", true
	}
	return e.key, e.hasKey
}

// push queues the next row.
func (q *queue) push(e *entry) {
	lane, ordered := q.lane(e)
	if !ordered {
		q.release(e)
		return
	}
	before, held := q.last[lane]
	q.last[lane] = e
	if held {
		before.behind = e
		q.waiting++
		return
	}
	q.release(e)
}

// pop hands out a row, nil when none may go. The rows behind it wait until done or again.
func (q *queue) pop() *entry { return q.ready.pop() }

// popUnread hands out a row whose payload must be read again, nil when there is none. release gives it back.
func (q *queue) popUnread() *entry { return q.unread.pop() }

// release makes e ready, or unread while its payload is missing.
func (q *queue) release(e *entry) {
	if e.loaded {
		q.ready.push(e)
	} else {
		q.unread.push(e)
	}
}

// done ends e's turn; the next row of its key is free to go.
func (q *queue) done(e *entry) {
	lane, ordered := q.lane(e)
	if !ordered {
		return
	}
	next := e.behind
	e.behind = nil
	if next != nil {
		q.waiting--
		q.release(next)
	} else if q.last[lane] == e {
		delete(q.last, lane)
	}
}

// follow hands out the row right behind e, to go out together with it: nil unless it is here and of the same topic. From
// then on each of the two is done on its own, in order; rejoin undoes it.
func (q *queue) follow(e *entry) *entry {
	next := e.behind
	if next == nil || !next.loaded || next.topic != e.topic {
		return nil
	}
	e.behind = nil
	q.waiting--
	return next
}

// rejoin puts next, handed out by follow, back behind e.
func (q *queue) rejoin(e, next *entry) {
	e.behind = next
	q.waiting++
}

// delay takes e's turn from it without ending it: its key waits. release gives the turn back.
func (q *queue) delay(*entry) { q.waiting++ }

// resume is release for a row that was delayed.
func (q *queue) resume(e *entry) {
	q.waiting--
	q.release(e)
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

// peek returns what pop would, nil when there is nothing.
func (f *fifo) peek() *entry {
	if f.head == len(f.rows) {
		return nil
	}
	return f.rows[f.head]
}

func (f *fifo) len() int { return len(f.rows) - f.head }
