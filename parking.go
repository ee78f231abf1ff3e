package pgoutbox

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ParkPolicy says what is set aside when a row is given up: after MaxAttempts failures, or at once when the failure is
// ErrPermanent. What is parked stands in the table outbox_parked until Unpark has it delivered again.
type ParkPolicy int

const (
	// ParkRow is the default: the row alone. Rows of its key that come later are delivered, without it.
	ParkRow ParkPolicy = iota
	// ParkKey parks the row, and every later one of its key, in order and without an attempt, until they are unparked. The order
	// of the key is kept. A row without a key is parked alone.
	ParkKey
)

// trouble is what went wrong with a row, in this term.
type trouble struct {
	failures int       // deliveries of the row by itself that failed
	since    time.Time // the first of them
	last     string    // what the last one said
	wholeKey bool      // the row is parked together with its key
	unparked bool      // the row was parked and is back: it goes out although its key is parked
	suspect  bool      // the row may have been out when a leader ended without giving the shard back
	behind   bool      // of the suspects, one behind the stored position
	hopeless bool      // leaders ended with the row alone out: it is parked before it goes out once more
}

// note counts a failure.
func (t *trouble) note(err error) {
	if t.failures++; t.failures == 1 {
		t.since = time.Now()
	}
	t.last = noReason
	if err != nil {
		t.last = storable(err.Error())
	}
}

// storable is a text that PostgreSQL takes, and not too long.
func storable(text string) string {
	text = strings.ToValidUTF8(cutBytes(text, errorMost), "\ufffd")
	return strings.ReplaceAll(text, "\x00", "\ufffd")
}

func (e *entry) troubled() *trouble {
	if e.trouble == nil {
		e.trouble = &trouble{}
	}
	return e.trouble
}

// noReason stands in the table when a message was nacked and nobody said why; see ReportErrors.
const noReason = "nacked"

const (
	parkMost  = 400         // rows parked in one statement
	parkBytes = 8 << 10     // and bytes of their errors
	moveRetry = time.Second // after a statement that failed
	ageMost   = 1 << 50     // microseconds
	errorMost = 500         // bytes of an error that are stored
)

// givesUp reports whether a row that has just failed is parked instead of repeated.
func (r *reader) givesUp(e *entry, err error) bool {
	return errors.Is(err, ErrPermanent) || (r.maxAttempts > 0 && e.trouble.failures >= r.maxAttempts)
}

// giveUp sets a row that is out, and had its turn, aside. Under ParkRow its key waits until that is stored; under ParkKey what comes
// behind it is set aside after it.
func (sh *shard) giveUp(e *entry) {
	t := e.troubled()
	t.wholeKey = sh.reader.parkPolicy == ParkKey && e.hasKey
	t.unparked = false
	if t.wholeKey {
		sh.parkKey(e.key)
		sh.queue.done(e)
	} else {
		sh.queue.delay(e)
	}
	sh.aside = append(sh.aside, e)
}

func (sh *shard) parkKey(key string) {
	sh.parkedKeys[key] = true
	if _, ok := sh.freeing[key]; ok {
		sh.freeing[key] = false
	}
}

// keptBack sets a row that was about to go out aside, if its key is parked or leaders did not survive it. mu is held.
func (sh *shard) keptBack(e *entry) bool {
	switch t := e.trouble; {
	case t != nil && t.hopeless:
		sh.unload(e)
		sh.giveUp(e)
	case len(sh.parkedKeys) > 0 && e.hasKey && sh.parkedKeys[e.key] && (t == nil || !t.unparked):
		sh.unload(e)
		e.troubled().wholeKey = true
		sh.queue.done(e)
		sh.aside = append(sh.aside, e)
	default:
		return false
	}
	return true
}

// unload drops the payload of a row that will not go out.
func (sh *shard) unload(e *entry) {
	if !e.loaded {
		return
	}
	sh.held--
	sh.heldBytes -= len(e.payload)
	if e.size > inlineLimit {
		sh.heavy -= e.size
	}
	e.loaded, e.payload = false, nil
}

// park has what was set aside stored, one statement for each shard at a time.
func (r *reader) park() {
	now := time.Now()
	r.mu.Lock()
	var due []*shard
	for _, sh := range r.shards {
		switch wait := sh.moveAgain.Sub(now); {
		case sh.gone || len(sh.aside) == 0 || sh.moving || len(sh.freeing) > 0:
			// A key that is being freed takes what is aside with it.
		case wait > 0:
			r.again = min(r.again, wait)
		default:
			sh.moving = true
			due = append(due, sh)
		}
	}
	r.mu.Unlock()
	for _, sh := range due {
		r.leadership.move(sh.lead, &parking{shard: sh})
	}
}

// parking is one statement on its way from the shard's list to the table.
type parking struct {
	shard *shard
	rows  []*entry
}

func (p *parking) look(context.Context, *session) (bool, error) { return true, nil }

// prepare lists the rows and the position that passes them. They count as emitted, so that it does.
func (p *parking) prepare() (move, bool) {
	sh, now := p.shard, time.Now()
	sh.reader.mu.Lock()
	defer sh.reader.mu.Unlock()
	p.rows = nil
	acked := map[*entry]bool{}
	var ids, attempts, ages []int64
	var xids, whole, reasons []string
	size := 0
	for _, e := range sh.aside[:min(len(sh.aside), parkMost)] {
		t := e.trouble
		if size += len(t.last); size > parkBytes && len(p.rows) > 0 {
			break
		}
		sh.cursor.emit(e)
		acked[e] = true
		p.rows = append(p.rows, e)
		age := int64(0)
		if !t.since.IsZero() {
			age = min(now.Sub(t.since).Microseconds(), ageMost)
		}
		ids, attempts, ages = append(ids, e.id), append(attempts, int64(t.failures)), append(ages, age)
		xids, reasons = append(xids, strconv.FormatUint(e.xid, 10)), append(reasons, t.last)
		whole = append(whole, strconv.FormatBool(t.wholeKey))
	}
	return move{
		save: sh.saveOf(sh.cursor.stateWithout(acked)),
		sql:  sh.reader.leadership.queries.park,
		args: []any{ids, arrayLiteral(xids), attempts, ages, arrayLiteral(whole), arrayLiteral(reasons)},
	}, len(ids) > 0
}

// finish lets go of the rows, or tries again later.
func (p *parking) finish(stored bool) {
	sh := p.shard
	r := sh.reader
	r.mu.Lock()
	sh.moving = false
	if !stored {
		sh.moveAgain = time.Now().Add(jitter(moveRetry))
		r.mu.Unlock()
		r.poke()
		return
	}
	sh.aside = slices.Delete(sh.aside, 0, len(p.rows))
	for _, e := range p.rows {
		sh.cursor.ack(e)
		if !e.trouble.wholeKey {
			sh.queue.undelay(e)
		}
	}
	r.next(sh)
	r.mu.Unlock()
	r.poke()
	for _, e := range p.rows {
		if t := e.trouble; t.last != "" {
			r.report.failed("a row was parked", errors.New(t.last), map[string]any{"row": e.id, "shard": sh.shard, "attempts": t.failures})
		} else {
			r.report.info("a row was parked, because its key is", map[string]any{"row": e.id, "shard": sh.shard})
		}
	}
}
