package pgoutbox

import (
	"math"
	"slices"
)

// position is a place in the order in which the rows of a shard are emitted: everything of the batch up to id last, and
// everything of the batches before it.
type position struct {
	batch *batch
	last  int64 // batchEnd: the whole batch
}

// batchEnd as the last id says that the batch was read to its end.
const batchEnd = math.MaxInt64

// between is the position after everything that s saw, and before anything else.
func between(s snapshot) position { return position{batch: &batch{upto: s}, last: batchEnd} }

func (p position) atEnd() bool { return p.last == batchEnd }

// covers reports whether nothing was numbered between the two: other transactions ended, maybe that of our own last save, but
// to go on from either comes to the same.
func (p position) covers(earlier position) bool {
	if p == earlier {
		return true
	}
	at, before := p.batch.upto, earlier.batch.upto
	return p.atEnd() && earlier.atEnd() && at.epoch == before.epoch && at.low == before.low && at.high == before.high
}

// entry is one row between being fetched and being acked.
type entry struct {
	record

	seq        uint64   // place in the emission order of its shard
	batch      *batch   // nil: it was pending when the shard was taken over
	prev, next *entry   // the cursor's list
	behind     *entry   // the queue: the next row of the same key
	attempt    int      // deliveries so far, by this term
	loaded     bool     // the payload is here; otherwise it is read again by id before it goes out
	partial    bool     // only id, transaction, key, topic and size were read so far
	stage      stage    // the queue's
	trouble    *trouble // nil: none so far
}

// cursor follows one shard from fetch to ack. Rows are added in emission order, emitted in any order that keeps keys in
// theirs, and acked in any order at all. What it stores is the frontier of emission and the ids before it that are not
// acked, so a crash repeats exactly those and then goes on.
//
// It is a plain value: no clock, no database, no lock. Its owner guards it.
type cursor struct {
	head, tail *entry // not acked, in emission order
	unacked    int
	fetched    position // every row up to here was added
	front      position // the furthest row that was emitted
	frontSeq   uint64
	lastSeq    uint64
	acks       uint64 // rows done with
	changes    uint64 // grows whenever an emission or an ack changes what should be stored
}

func newCursor(at position) *cursor { return &cursor{fetched: at, front: at} }

// restore adds a row that was pending when the position was stored. It lies before the frontier.
func (c *cursor) restore(e *entry) {
	c.append(e)
	c.frontSeq = e.seq
}

// prepend adds rows that were parked, in order, before everything else: their time was long ago.
func (c *cursor) prepend(list []*entry) {
	for _, e := range slices.Backward(list) {
		e.next = c.head
		if c.head == nil {
			c.tail = e
		} else {
			c.head.prev = e
		}
		c.head = e
		c.unacked++
	}
	c.changes++
}

// add takes over the next row of the batch being fetched. When all rows before it have gone out, the frontier stands where the
// fetch did: it may have been stored so, at the end of a batch, and what is stored later must not lie before it.
func (c *cursor) add(e *entry, b *batch) {
	if c.frontSeq == c.lastSeq {
		c.front = c.fetched
	}
	e.batch = b
	c.append(e)
	c.fetched = position{b, e.id}
}

func (c *cursor) append(e *entry) {
	c.lastSeq++
	e.seq = c.lastSeq
	e.prev = c.tail
	if c.tail == nil {
		c.head = e
	} else {
		c.tail.next = e
	}
	c.tail = e
	c.unacked++
}

// reach says that there is no further row up to p.
func (c *cursor) reach(p position) { c.fetched = p }

// emit says that e goes out: from here on it may have been seen, so it is either acked or pending.
func (c *cursor) emit(e *entry) {
	c.changes++
	if e.seq > c.frontSeq {
		c.frontSeq = e.seq
		c.front = position{e.batch, e.id}
	}
}

// ack says that e is done with. It must have been emitted, or have ceased to exist.
func (c *cursor) ack(e *entry) {
	c.changes++
	c.acks++
	if e.prev == nil {
		c.head = e.next
	} else {
		e.prev.next = e.next
	}
	if e.next == nil {
		c.tail = e.prev
	} else {
		e.next.prev = e.prev
	}
	e.prev, e.next = nil, nil
	c.unacked--
}

// state is what must be stored: the frontier, and in emission order the ids at or before it that are not acked. When all
// that was fetched has gone out, the frontier is where the fetch stands.
func (c *cursor) state() (position, []int64) { return c.stateWithout(nil) }

// stateWithout is what state will be once these rows are acked.
func (c *cursor) stateWithout(acked map[*entry]bool) (position, []int64) {
	at := c.front
	if c.frontSeq == c.lastSeq {
		at = c.fetched
	}
	pending := []int64{}
	for e := c.head; e != nil && e.seq <= c.frontSeq; e = e.next {
		if !acked[e] {
			pending = append(pending, e.id)
		}
	}
	return at, pending
}
