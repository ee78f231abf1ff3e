package torture

import (
	"sync"
	"time"
)

// history is the harness's own diary: when commits were acknowledged, when long transactions were open, when something
// was broken on purpose. Times count from the start of the run, by the monotonic clock that the sinks use too. It is safe
// for concurrent use.
type history struct {
	start time.Time

	mu      sync.Mutex
	commits []time.Duration // by message id; 0 = never acknowledged
	long    []Span
	faults  []Fault
}

// History is what Judge needs to know of a run besides the oracle and the log.
type History struct {
	Commits []time.Duration // by message id, when its COMMIT was acknowledged; 0 = never
	Long    []Span          // when a long transaction was open
	Faults  []Fault
}

// Span is a stretch of a run.
type Span struct{ From, To time.Duration }

// Fault is something that was broken on purpose from At until Until.
type Fault struct {
	Kind      string // as in the report
	Entrant   string // whom it hit; "" = everybody
	Orderly   bool   // a stop that lets what is in flight finish, so it explains a delay but no duplicate
	At, Until time.Duration
}

func (h *history) now() time.Duration { return time.Since(h.start) }

func (h *history) committed(messages []Message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.now()
	for _, m := range messages {
		for int64(len(h.commits)) <= m.ID {
			h.commits = append(h.commits, 0)
		}
		h.commits[m.ID] = now
	}
}

func (h *history) stayedOpen(s Span) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.long = append(h.long, s)
}

func (h *history) broke(f Fault) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.faults = append(h.faults, f)
}

// of returns the history as it concerns one entrant.
func (h *history) of(entrant string) History {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := History{Commits: h.commits, Long: h.long}
	for _, f := range h.faults {
		if f.Entrant == "" || f.Entrant == entrant {
			out.Faults = append(out.Faults, f)
		}
	}
	return out
}
