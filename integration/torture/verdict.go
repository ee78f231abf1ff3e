package torture

import (
	"fmt"
	"time"
)

// Verdict is what a reader did to the messages of a run.
type Verdict struct {
	Committed  int // messages in the oracle
	Handled    int // of those, delivered and acknowledged at least once
	Deliveries int // lines of the log

	Lost        int           // committed, but no delivery was ever acknowledged: a row whose handler failed or died must come again
	Ghosts      int           // delivered, never committed; each message counts once
	Damaged     int           // deliveries that differ from what was written
	Inversions  int           // first deliveries that came after the first delivery of a later version of their key
	Overlaps    int           // deliveries of a key whose delivery before was not acknowledged, by the same incarnation
	Duplicates  int           // deliveries of a message beyond its first
	Unexplained int           // duplicates that no fault and no refusal accounts for
	Undone      time.Duration // longest from an ack to the fault that made its message come again

	Overtaken int // deliveries acknowledged before one that came earlier; shows that acks were out of order

	Delay   time.Duration // longest from commit to first delivery, of other rows while a long transaction was open, outside faults
	Worst   time.Duration // the same over all rows, faults included
	Silence time.Duration // longest stretch without a first delivery although a committed row was waiting

	Examples []string // of what went wrong, a few a kind
}

// maxExamples bounds the examples of one kind.
const maxExamples = 5

// Judge compares what committed with what was delivered. saved is how long before a fault an ack is certain to survive it.
func Judge(oracle []Entry, log []Record, h History, saved time.Duration) Verdict {
	j := judgement{
		committed: make(map[int64]Entry, len(oracle)),
		first:     make(map[int64]int, len(oracle)),
		handled:   make(map[int64]bool, len(oracle)),
		log:       log,
		history:   h,
		saved:     saved,
	}
	for _, e := range oracle {
		j.committed[e.ID] = e
	}
	j.Committed, j.Deliveries = len(oracle), len(log)
	j.walk()
	for _, e := range oracle {
		if j.handled[e.ID] {
			continue
		}
		j.Lost++
		if n, ok := j.first[e.ID]; ok {
			j.examplef(j.Lost, "lost: %s was not acknowledged and never came again", log[n])
		} else {
			j.examplef(j.Lost, "lost: version %d of key %q (message %d) never came", e.Version, e.Key, e.ID)
		}
	}
	j.Handled = j.Committed - j.Lost
	j.delays()
	return j.Verdict
}

// judgement is a verdict in the making.
type judgement struct {
	Verdict
	committed map[int64]Entry
	first     map[int64]int // message → its first line in the log
	handled   map[int64]bool
	log       []Record
	history   History
	saved     time.Duration
}

// walk goes through the log once, in the order of the deliveries.
func (j *judgement) walk() {
	type holder struct {
		key         string
		incarnation int
	}
	var (
		highest = make(map[string]int)        // key → line of the latest version delivered so far
		last    = make(map[int64]int)         // message → its line before
		acked   = make(map[int]time.Duration) // incarnation → the latest ack of its deliveries so far
		latest  = make(map[holder]int)        // line before of a key, by the same incarnation
	)
	for n, r := range j.log {
		if r.Damage != "" {
			j.Damaged++
			j.examplef(j.Damaged, "damaged: row %d: %s", r.Row, r.Damage)
		}
		if r.ID == 0 { // not even the message can be told
			continue
		}
		if r.Acked > 0 {
			j.handled[r.ID] = true
			if r.Acked < acked[r.Incarnation] {
				j.Overtaken++
			}
			acked[r.Incarnation] = max(acked[r.Incarnation], r.Acked)
		}
		if r.Key != "" {
			of := holder{r.Key, r.Incarnation}
			if p, ok := latest[of]; ok && !ended(j.log[p], r.At) {
				j.Overlaps++
				j.examplef(j.Overlaps, "overlap: %s came while %s was not acknowledged", r, j.log[p])
			}
			latest[of] = n
		}
		if p, ok := last[r.ID]; ok {
			j.Duplicates++
			if !j.explained(j.log[p], r) {
				j.Unexplained++
				j.examplef(j.Unexplained, "duplicate: %s came again as %s", j.log[p], r)
			}
			last[r.ID] = n
			continue
		}
		last[r.ID] = n
		if _, ok := j.committed[r.ID]; !ok {
			j.Ghosts++
			j.examplef(j.Ghosts, "ghost: %s did not commit", r)
			continue
		}
		j.first[r.ID] = n
		if r.Key == "" {
			continue
		}
		if p, ok := highest[r.Key]; ok && r.Version < j.log[p].Version {
			j.Inversions++
			j.examplef(j.Inversions, "inverted: %s came after %s", r, j.log[p])
			continue
		}
		highest[r.Key] = n
	}
}

// ended tells whether the handler of r had come to an end before t.
func ended(r Record, t time.Duration) bool {
	return r.Refused || r.Acked > 0 && r.Acked <= t
}

// explained tells whether a message may come again: its handler failed, or a fault fell between its delivery and the
// moment in which its ack was certain to be durable.
func (j *judgement) explained(before, again Record) bool {
	if before.Refused {
		return true
	}
	found, undone := false, j.saved
	for _, f := range j.history.Faults {
		durable := before.Acked > 0 && before.Acked+j.saved < f.At
		if !f.Orderly && !durable && f.At <= again.At && before.At <= f.Until+j.saved {
			found = true
			undone = min(undone, max(0, f.At-before.Acked))
		}
	}
	if found && before.Acked > 0 {
		j.Undone = max(j.Undone, undone)
	}
	return found
}

// examplef notes what went wrong, as long as it is among the first of its kind.
func (j *judgement) examplef(count int, format string, args ...any) {
	if count <= maxExamples {
		j.Examples = append(j.Examples, fmt.Sprintf(format, args...))
	}
}

// String names a delivery in an example.
func (r Record) String() string {
	return fmt.Sprintf("version %d of key %q (message %d, row %d, incarnation %d, %.3fs)",
		r.Version, r.Key, r.ID, r.Row, r.Incarnation, r.At.Seconds())
}
