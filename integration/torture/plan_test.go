package torture

import (
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func TestPlansCoverEveryKindAndRollBackFivePercent(t *testing.T) {
	const n = 100_000
	var (
		rnd        = rand.New(rand.NewPCG(1, 2))
		combined   = make(map[[3]int]bool)
		early      int
		ended      [ends]int
		perMessage [4]int
	)
	for range n {
		p := drawPlan(rnd)
		combined[[3]int{int(p.lock), int(p.put), int(p.nest)}] = true
		ended[p.end]++
		perMessage[len(p.keys)]++
		if p.early {
			early++
		}
		if !slices.IsSorted(p.keys) {
			t.Fatalf("keys %v are not locked in ascending order: writers would deadlock", p.keys)
		}
	}
	if want := int(locks) * int(puts) * int(nests); len(combined) != want {
		t.Errorf("%d combinations of lock, put and savepoint, want all %d", len(combined), want)
	}
	about := func(what string, got, percent int) {
		if want := n * percent / 100; got < want*9/10 || got > want*11/10 {
			t.Errorf("%d of %d %s, want about %d", got, n, what, want)
		}
	}
	about("roll back", ended[rollback], 5)
	about("are prepared", ended[prepareCommit]+ended[prepareRollback], 6)
	about("draw their xid early", early, 50)
	for messages := 1; messages <= 3; messages++ {
		about("have as many messages as the others", perMessage[messages], 33)
	}
	if ended[prepareRollback] == 0 {
		t.Error("no prepared transaction is rolled back")
	}
}

func TestServerCrashesTwiceInAShortRunAndMoreOftenInALongOne(t *testing.T) {
	tests := []struct {
		run   time.Duration
		count int
		last  time.Duration
	}{
		{10 * time.Second, 2, 9 * time.Second},
		{20 * time.Second, 2, 18 * time.Second},
		{10 * time.Minute, 20, 9 * time.Minute},
	}
	for _, tt := range tests {
		times := crashTimes(tt.run)
		if len(times) != tt.count || times[0] != tt.run/10 || times[len(times)-1] != tt.last {
			t.Errorf("a run of %v crashes at %v, want %d times, from 10 %% to %v", tt.run, times, tt.count, tt.last)
		}
	}
}
