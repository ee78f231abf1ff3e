package torture

import (
	"fmt"
	"time"
)

// Bounds is what a reader promises in a run besides what always holds.
type Bounds struct {
	// Undisturbed says that the run had no faults: then nothing comes twice, and of one key nothing overlaps. (After a
	// fault nobody can tell whether a handler of the lost leadership still runs.)
	Undisturbed bool
	// Delay bounds the wait of other rows while long transactions are open, outside faults.
	Delay time.Duration
}

// Broken names the promises that did not hold; a good reader breaks none.
func (v Verdict) Broken(b Bounds) []string {
	var out []string
	zero := func(n int, what string) {
		if n != 0 {
			out = append(out, fmt.Sprintf("%d %s, not 0", n, what))
		}
	}
	if v.Committed == 0 {
		out = append(out, "nothing was committed, so nothing was shown")
	}
	zero(v.Lost, "lost")
	zero(v.Ghosts, "ghosts")
	zero(v.Damaged, "damaged")
	zero(v.Inversions, "inversions of first deliveries")
	zero(v.Unexplained, "unexplained duplicates")
	if b.Undisturbed {
		zero(v.Duplicates, "duplicates")
		zero(v.Overlaps, "overlapping deliveries of a key")
	}
	if v.Delay > b.Delay {
		out = append(out, fmt.Sprintf("other rows waited %v behind long transactions, not %v at most", v.Delay, b.Delay))
	}
	return out
}
