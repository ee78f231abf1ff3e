package pgoutbox

import "testing"

var here = epoch{number: firstEpoch}

func TestTickMarksNeverFall(t *testing.T) {
	tests := []struct {
		name          string
		low, last     string
		high, stray   int64 // known before
		wantLow, want int64
		above         bool // a row is known to lie above the sequence
	}{
		{"the sequence alone", "100", "120", 0, 0, 100, 120, false},
		{"nothing drawn yet", "0", "0", 0, 0, 0, 0, false},
		{"an earlier mark is higher", "100", "120", 150, 0, 100, 150, false},
		{"the sequence was set back", "5", "6", 150, 0, 5, 150, false},
		{"a row above the sequence", "100", "120", 110, 130, 100, 130, true},
		{"a row above it, an earlier mark above both", "100", "120", 140, 130, 100, 140, true},
		{"the sequence went past the row", "100", "140", 130, 130, 100, 140, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := readTick(tt.low, "740:742:740", tt.last, here, tt.high, tt.stray)
			if err != nil || got.low != tt.wantLow || got.high != tt.want {
				t.Errorf("got %d to %d (%v), want %d to %d", got.low, got.high, err, tt.wantLow, tt.want)
			}
			if want := (snapshot{epoch: firstEpoch, low: tt.wantLow, high: tt.want, xmax: 742, running: []uint64{740}}); !got.equal(want) {
				t.Errorf("got %+v, want %+v", got.snapshot, want)
			}
			b := batch{after: snapshot{high: tt.stray - 1, xmax: 742, running: []uint64{740}}, upto: got.snapshot}
			if tt.above && b.quiet(got.stray) {
				t.Error("the row above the sequence is forgotten")
			}
		})
	}
	for _, bad := range [][3]string{{"", "1:1:", "1"}, {"1", "", "1"}, {"1", "1:1:", ""}, {"x", "1:1:", "1"}, {"1", "1:1", "1"}, {"1", "1:1:", "9223372036854775808"}} {
		if got, err := readTick(bad[0], bad[1], bad[2], here, 0, 0); err == nil {
			t.Errorf("%q was read as %+v", bad, got)
		}
	}
}
