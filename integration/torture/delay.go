package torture

import (
	"fmt"
	"slices"
	"time"
)

// settle is how long after the first sign of recovery a reader is left to catch up before its delays count again.
const settle = time.Second

// waiting is a message that committed at one time and was first delivered at another.
type waiting struct {
	committed, delivered time.Duration
	long                 bool
	line                 int // of the log
}

// delays fills in Delay, Worst and Silence. Only messages count whose COMMIT was acknowledged, because of no other the
// harness knows when it was.
func (j *judgement) delays() {
	var all []waiting
	for id, line := range j.first {
		if id < int64(len(j.history.Commits)) && j.history.Commits[id] > 0 {
			all = append(all, waiting{j.history.Commits[id], j.log[line].At, j.committed[id].Long, line})
		}
	}
	slices.SortFunc(all, func(a, b waiting) int { return int(a.delivered - b.delivered) })
	outages, slowest := outages(j.history.Faults, all), -1
	for _, w := range all {
		delay := w.delivered - w.committed
		if delay > j.Worst {
			j.Worst, slowest = delay, w.line
		}
		if !w.long && within(w.committed, j.history.Long) && !touches(w, outages) {
			j.Delay = max(j.Delay, delay)
		}
	}
	j.Silence = silence(all)
	if slowest >= 0 {
		j.Examples = append(j.Examples, fmt.Sprintf("slowest: %s waited %v", j.log[slowest], j.Worst.Round(time.Millisecond)))
	}
}

// silence is the longest stretch without a delivery in which at least one message waited. all is sorted by delivery.
func silence(all []waiting) (longest time.Duration) {
	earliest := time.Duration(1<<63 - 1) // commit among the messages that were delivered from here on
	for i, w := range slices.Backward(all) {
		earliest = min(earliest, w.committed)
		from := earliest
		if i > 0 {
			from = max(from, all[i-1].delivered)
		}
		longest = max(longest, w.delivered-from)
	}
	return longest
}

// outages turns faults into the stretches whose delays do not count: until something that committed after the fault is
// delivered, and a moment more. all is sorted by delivery.
func outages(faults []Fault, all []waiting) []Span {
	spans := make([]Span, 0, len(faults))
	for _, f := range faults {
		span := Span{f.At, time.Duration(1<<63 - 1)}
		for _, w := range all {
			if w.committed > f.Until && w.delivered > f.Until {
				span.To = w.delivered + settle
				break
			}
		}
		spans = append(spans, span)
	}
	return spans
}

func within(t time.Duration, spans []Span) bool {
	return slices.ContainsFunc(spans, func(s Span) bool { return s.From <= t && t <= s.To })
}

// touches tells whether any part of the wait lies in one of spans.
func touches(w waiting, spans []Span) bool {
	return slices.ContainsFunc(spans, func(s Span) bool { return w.committed <= s.To && s.From <= w.delivered })
}
