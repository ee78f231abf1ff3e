package torture

import (
	"strings"
	"testing"
	"time"
)

const second = time.Second

// testCase is a run in which everything went well until a test spoils it: three messages of key a and one of key b, one a
// second, each delivered 100 ms after its commit and acknowledged 10 ms later; a long transaction is open all the time.
type testCase struct {
	oracle  []Entry
	log     []Record
	history History
}

func goodCase() *testCase {
	c := &testCase{history: History{Long: []Span{{0, 10 * second}}, Commits: make([]time.Duration, 10)}}
	for i, m := range []Message{{1, "a", 1}, {2, "a", 2}, {3, "b", 1}, {4, "a", 3}} {
		at := time.Duration(i+1) * second
		c.history.Commits[m.ID] = at
		c.oracle = append(c.oracle, Entry{Message: m})
		c.log = append(c.log, Record{At: at + second/10, Acked: at + second/10 + 10*time.Millisecond, Incarnation: 1, Row: m.ID, Message: m})
	}
	return c
}

// again appends a second delivery of the log's line n, at the given time.
func (c *testCase) again(n int, at time.Duration) {
	r := c.log[n]
	r.At, r.Acked, r.Incarnation = at, at+10*time.Millisecond, 2
	c.log = append(c.log, r)
}

func (c *testCase) judge() Verdict { return Judge(c.oracle, c.log, c.history, second) }

func TestVerdictNamesWhatIsBroken(t *testing.T) {
	tests := []struct {
		name  string
		spoil func(*testCase)
		want  string // "" = nothing is broken
	}{
		{"nothing", func(*testCase) {}, ""},
		{"an empty run", func(c *testCase) { *c = testCase{} }, "nothing was committed, so nothing was shown"},
		{"a message never comes", func(c *testCase) { c.log = c.log[:3] }, "1 lost, not 0"},
		{"a message comes, is refused and does not come again", func(c *testCase) { c.log[3].Acked, c.log[3].Refused = 0, true }, "1 lost, not 0"},
		{"a message comes, its handler dies, and it does not come again", func(c *testCase) { c.log[3].Acked = 0 }, "1 lost, not 0"},
		{"a message comes that did not commit", func(c *testCase) { c.oracle = c.oracle[:3] }, "1 ghosts, not 0"},
		{"a row is changed on the way", func(c *testCase) { c.log[1].Damage = "key" }, "1 damaged, not 0"},
		{"a later version comes first", func(c *testCase) {
			c.log[0].Message, c.log[1].Message = c.log[1].Message, c.log[0].Message
		}, "1 inversions of first deliveries, not 0"},
		{"messages without a key have no order", func(c *testCase) {
			c.log[0].Message, c.log[1].Message = c.log[1].Message, c.log[0].Message
			for i := range c.log {
				c.log[i].Key = ""
			}
		}, ""},
		{"a key overlaps", func(c *testCase) { c.log[0].Acked = 3 * second }, "1 overlapping deliveries of a key, not 0"},
		{"a key overlaps an ack that never came", func(c *testCase) { c.log[0].Acked = 0 }, "1 lost, not 0; 1 overlapping deliveries of a key, not 0"},
		{"another key does not overlap", func(c *testCase) { c.log[2].Acked = 9 * second }, ""},
		{"a message comes twice", func(c *testCase) { c.again(0, 5*second) },
			"1 unexplained duplicates, not 0; 1 duplicates, not 0"},
		{"a row waits behind a long transaction", func(c *testCase) { c.log[3].At, c.log[3].Acked = 7*second, 7*second },
			"other rows waited 3s behind long transactions, not 2s at most"},
		{"a long transaction's own row may wait", func(c *testCase) {
			c.log[3].At, c.log[3].Acked, c.oracle[3].Long = 7*second, 7*second, true
		}, ""},
		{"a row waits while no long transaction is open", func(c *testCase) {
			c.log[3].At, c.log[3].Acked, c.history.Long = 7*second, 7*second, nil
		}, ""},
		{"a row whose commit was never acknowledged has no delay", func(c *testCase) {
			c.log[3].At, c.log[3].Acked, c.history.Commits[4] = 7*second, 7*second, 0
		}, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := goodCase()
			tt.spoil(c)
			got := strings.Join(c.judge().Broken(Bounds{Undisturbed: true, Delay: 2 * second}), "; ")
			if got != tt.want {
				t.Errorf("broken: %q, want %q", got, tt.want)
			}
		})
	}
}

func TestDuplicateNeedsAnExplanation(t *testing.T) {
	fault := func(at, until time.Duration) func(*testCase) {
		return func(c *testCase) { c.history.Faults = []Fault{{Kind: "killed", At: at, Until: until}} }
	}
	tests := []struct {
		name  string
		spoil func(*testCase)
		want  int // unexplained; the first message is delivered at 1.1 s, acknowledged at 1.11 s and delivered again at 5 s
	}{
		{"without a fault there is none", func(*testCase) {}, 1},
		{"a fault soon after the ack may lose it", fault(2*second, 2*second), 0},
		{"a fault long after the ack may not", fault(3*second, 3*second), 1},
		{"a fault before the delivery has nothing to do with it", fault(0, 0), 1},
		{"a fault after the duplicate neither", fault(6*second, 6*second), 1},
		{"an ack during the fault may be lost", fault(second, 4*second), 0},
		{"an orderly stop soon after the ack", func(c *testCase) { c.history.Faults = []Fault{{Orderly: true, At: 2 * second, Until: 2 * second}} }, 1},
		{"a handler that failed", func(c *testCase) { c.log[0].Acked, c.log[0].Refused = 0, true }, 0},
		{"a delivery without an ack, and a fault much later", func(c *testCase) {
			c.log[0].Acked = 0
			fault(4*second, 4*second)(c)
		}, 0},
		{"a delivery without an ack, and no fault", func(c *testCase) { c.log[0].Acked = 0 }, 1},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := goodCase()
			c.again(0, 5*second)
			tt.spoil(c)
			v := c.judge()
			if v.Duplicates != 1 || v.Unexplained != tt.want {
				t.Errorf("%d duplicates, %d unexplained; want 1 and %d", v.Duplicates, v.Unexplained, tt.want)
			}
		})
	}
}

func TestOnlyFirstDeliveriesCountAsInverted(t *testing.T) {
	c := goodCase()
	c.again(0, 5*second) // version 1 after version 3
	if v := c.judge(); v.Inversions != 0 || v.Duplicates != 1 {
		t.Errorf("%d inversions and %d duplicates, want 0 and 1", v.Inversions, v.Duplicates)
	}
}

func TestVerdictCountsOvertakingAcks(t *testing.T) {
	c := goodCase()
	if v := c.judge(); v.Overtaken != 0 {
		t.Errorf("%d overtaken in order, want 0", v.Overtaken)
	}
	c.log[1].Acked = 9 * second // lines 2 and 3 are acknowledged before it
	if v := c.judge(); v.Overtaken != 2 {
		t.Errorf("%d overtaken, want 2", v.Overtaken)
	}
}

func TestExamplesAreFew(t *testing.T) {
	var c testCase
	for id := range int64(100) {
		c.oracle = append(c.oracle, Entry{Message: Message{id + 1, "a", id + 1}})
	}
	if v := c.judge(); v.Lost != 100 || len(v.Examples) != maxExamples {
		t.Errorf("%d lost with %d examples, want 100 with %d", v.Lost, len(v.Examples), maxExamples)
	}
}
