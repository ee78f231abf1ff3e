package torture

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// tally counts what the workload did, by kind. It is safe for concurrent use.
type tally struct {
	mu     sync.Mutex
	counts map[string]map[string]int
}

func (t *tally) add(group, kind string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.counts == nil {
		t.counts = make(map[string]map[string]int)
	}
	if t.counts[group] == nil {
		t.counts[group] = make(map[string]int)
	}
	t.counts[group][kind]++
}

// ran counts a transaction that came to the end its plan wanted.
func (t *tally) ran(p plan) {
	t.add("end", p.end.String())
	t.add("lock", p.lock.String())
	t.add("put", p.put.String())
	t.add("nest", p.nest.String())
	if p.early {
		t.add("xid", "drawn before the lock")
	} else {
		t.add("xid", "drawn with or after it")
	}
}

// String lists a group a line.
func (t *tally) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	var b strings.Builder
	for _, group := range slices.Sorted(maps.Keys(t.counts)) {
		fmt.Fprintf(&b, "%-6s", group)
		for _, kind := range slices.Sorted(maps.Keys(t.counts[group])) {
			fmt.Fprintf(&b, "  %s %d", kind, t.counts[group][kind])
		}
		b.WriteByte('\n')
	}
	return b.String()
}
