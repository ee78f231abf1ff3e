package torture

import (
	"context"
	"sync"
	"time"
)

// hold makes every handler of an entrant wait, as when the broker behind it hangs. What dies then dies with many rows
// delivered and not acknowledged, and each must come again. It is safe for concurrent use; two holds last as long as the
// longer one.
type hold struct {
	mu   sync.Mutex
	n    int
	open chan struct{} // closed when the last hold ends; nil = nothing is held
}

// holdTime is long enough for most of what is committed meanwhile to be delivered.
const holdTime = 200 * time.Millisecond

// begin holds until the function that it returns is called.
func (h *hold) begin() (end func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.n == 0 {
		h.open = make(chan struct{})
	}
	h.n++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.n--
		if h.n == 0 {
			close(h.open)
			h.open = nil
		}
	}
}

// wait returns when nothing is held, or with ctx's error.
func (h *hold) wait(ctx context.Context) error {
	for {
		h.mu.Lock()
		open := h.open
		h.mu.Unlock()
		if open == nil {
			return ctx.Err()
		}
		select {
		case <-open:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
