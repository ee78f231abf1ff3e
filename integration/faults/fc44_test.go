//go:build unix

package faults

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"
)

// FC-44: a hundred rows of 5 MB in one shard. The process takes them with 128 MB, all that the runtime needs included.
func TestFC44_HugeRowsFitIntoASmallProcess(t *testing.T) {
	const rows, size, most = 100, 5 << 20, memoryFactor * 128 << 20
	db, j := newOutbox(t), NewJournal()
	for i := range rows {
		db.Exec("INSERT INTO outbox (topic, key, uuid, payload) VALUES ('orders', 'key ' || $1::int, 'huge', decode(repeat('5a', $2::int), 'hex'))", i, size)
	}
	p := db.start(Role{Shards: 1, Lanes: 64, Work: time.Millisecond}, j)
	db.waitForAll(j)
	peak := peakMemory(t, p.PID)
	t.Logf("%d rows of %d MB with %d MB at most", rows, size>>20, peak>>20)
	if peak > most {
		t.Errorf("the process took %d MB", peak>>20)
	}
}

// peakMemory is the largest resident size of a process so far.
func peakMemory(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Skip("this system does not tell how much memory a process took: ", err)
	}
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kb, err := strconv.Atoi(strings.Fields(text)[0])
			if err != nil {
				t.Fatal(err)
			}
			return kb << 10
		}
	}
	t.Fatal("no VmHWM")
	return 0
}
