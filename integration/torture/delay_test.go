package torture

import (
	"testing"
	"time"
)

func TestDelaysLeaveOutFaultsUntilTheReaderRecovered(t *testing.T) {
	tests := []struct {
		name  string
		fault Fault
		want  time.Duration // the last message commits at 4 s and is delivered at 7 s, the others wait 100 ms
	}{
		{"no fault", Fault{At: 20 * second, Until: 20 * second}, 3 * second},
		{"a fault in the middle of the wait", Fault{At: 5 * second, Until: 6 * second}, second / 10},
		{"a fault that was over before", Fault{At: second / 2, Until: second / 2}, 3 * second},
		{"a fault whose recovery this row is", Fault{At: 3500 * time.Millisecond, Until: 3500 * time.Millisecond}, second / 10},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := goodCase()
			c.log[3].At, c.log[3].Acked = 7*second, 7*second
			c.history.Faults = []Fault{tt.fault}
			v := c.judge()
			if v.Delay != tt.want {
				t.Errorf("delay %v, want %v", v.Delay, tt.want)
			}
			if v.Worst != 3*second {
				t.Errorf("worst delay %v, want 3s whatever happened", v.Worst)
			}
		})
	}
}

func TestSilenceIsAGapInWhichSomethingWaited(t *testing.T) {
	tests := []struct {
		name string
		all  []waiting // sorted by delivery
		want time.Duration
	}{
		{"nothing", nil, 0},
		{"one message", []waiting{{committed: 1, delivered: 3}}, 2},
		{"a gap with nothing to deliver is none", []waiting{{committed: 1, delivered: 2}, {committed: 100, delivered: 103}}, 3},
		{"a gap with a message waiting", []waiting{{committed: 1, delivered: 2}, {committed: 3, delivered: 10}}, 7},
		{"the gap begins with the delivery before", []waiting{{committed: 1, delivered: 6}, {committed: 2, delivered: 10}}, 5},
		{"a message that waits through several gaps", []waiting{
			{committed: 1, delivered: 2}, {committed: 8, delivered: 9}, {committed: 3, delivered: 10},
		}, 6},
		{"a delivery seen before its commit was acknowledged", []waiting{{committed: 3, delivered: 2}}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := silence(tt.all); got != tt.want {
				t.Errorf("silence %d, want %d", got, tt.want)
			}
		})
	}
}
