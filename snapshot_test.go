package pgoutbox

import (
	"math"
	"math/big"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestSnapshotIsReadAsTheServerWritesIt(t *testing.T) {
	tests := []struct {
		name, text string
		xmax       uint64
		running    []uint64
		bad        bool
	}{
		{name: "nothing running", text: "740:740:", xmax: 740},
		{name: "one running", text: "740:742:740", xmax: 742, running: []uint64{740}},
		{name: "several running", text: "740:745:740,742,744", xmax: 745, running: []uint64{740, 742, 744}},
		{name: "xmin below the list", text: "740:745:742", xmax: 745, running: []uint64{742}},
		{name: "the schema's first cursor", text: "1:1:", xmax: 1},
		{name: "beyond 32 bits", text: "4294967296:8589934593:8589934592", xmax: 8589934593, running: []uint64{8589934592}},
		{name: "the last xid of all", text: "18446744073709551614:18446744073709551615:", xmax: math.MaxUint64},
		{name: "empty", bad: true},
		{name: "two parts", text: "740:740", bad: true},
		{name: "four parts", text: "740:740::", bad: true},
		{name: "no xmin", text: ":740:", bad: true},
		{name: "no xmax", text: "740::", bad: true},
		{name: "xmin zero", text: "0:740:", bad: true},
		{name: "xmin above xmax", text: "741:740:", bad: true},
		{name: "running below xmin", text: "740:745:739", bad: true},
		{name: "running at xmax", text: "740:745:745", bad: true},
		{name: "descending", text: "740:745:742,741", bad: true},
		{name: "repeated", text: "740:745:742,742", bad: true},
		{name: "comma at the end", text: "740:745:742,", bad: true},
		{name: "comma at the start", text: "740:745:,742", bad: true},
		{name: "only a comma", text: "740:745:,", bad: true},
		{name: "blanks", text: "740:745: 742", bad: true},
		{name: "signs", text: "+740:745:", bad: true},
		{name: "negative", text: "-1:745:", bad: true},
		{name: "over 64 bits", text: "740:18446744073709551616:", bad: true},
		{name: "not numbers", text: "a:b:c", bad: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := parseSnapshot(tt.text)
			if tt.bad {
				if err == nil {
					t.Fatalf("%q was read as %+v", tt.text, got)
				}
				return
			}
			want := snapshot{epoch: firstEpoch, xmax: tt.xmax, running: tt.running}
			if err != nil || !got.equal(want) {
				t.Errorf("got %+v (%v), want %+v", got, err, want)
			}
		})
	}
}

func FuzzSnapshotIsReadAsPostgreSQLReadsIt(f *testing.F) {
	for _, text := range []string{"740:745:740,742,744", "1:1:", "740:740:", "740:745:742,742", "9:1:", "1:9:8,", "01:9:", "1:18446744073709551616:"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := parseSnapshot(text)
		if want := isSnapshot(text); (err == nil) != want {
			t.Fatalf("%q: error %v, PostgreSQL would have written it: %v", text, err, want)
		}
		if err != nil {
			return
		}
		again, err := parseSnapshot(s.text())
		if err != nil || !again.equal(s) {
			t.Errorf("%q became %q, which reads as %+v (%v)", text, s.text(), again, err)
		}
		for _, xid := range append(slices.Clone(s.running), 0, 1, s.xmax-1, s.xmax, math.MaxUint64) {
			for _, xid := range []uint64{xid - 1, xid, xid + 1} {
				if got, want := s.sees(xid), xid < s.xmax && !slices.Contains(s.running, xid); got != want {
					t.Errorf("%q sees %d: %v", text, xid, got)
				}
			}
		}
	})
}

var snapshotForm = regexp.MustCompile(`^[0-9]+:[0-9]+:([0-9]+(,[0-9]+)*)?$`)

// isSnapshot is the rule of pg_snapshot's input function, less what its output function never writes: repetitions, blanks and
// a comma at the end.
func isSnapshot(text string) bool {
	if !snapshotForm.MatchString(text) {
		return false
	}
	most := new(big.Int).SetUint64(math.MaxUint64)
	var numbers []*big.Int
	for _, digits := range strings.FieldsFunc(text, func(r rune) bool { return r == ':' || r == ',' }) {
		n, _ := new(big.Int).SetString(digits, 10)
		if n.Cmp(most) > 0 {
			return false
		}
		numbers = append(numbers, n)
	}
	xmin, xmax := numbers[0], numbers[1]
	if xmin.Sign() == 0 || xmin.Cmp(xmax) > 0 {
		return false
	}
	for i, n := range numbers[2:] {
		if n.Cmp(xmin) < 0 || n.Cmp(xmax) >= 0 || (i > 0 && n.Cmp(numbers[i+1]) <= 0) {
			return false
		}
	}
	return true
}

func TestSnapshotSees(t *testing.T) {
	s := snapshot{low: 100, high: 120, xmax: 50, running: []uint64{40, 45}}
	tests := []struct {
		name    string
		id      int64
		xid     uint64
		visible bool
	}{
		{"ended long ago", 1, 3, true},
		{"ended between running ones", 90, 42, true},
		{"running", 90, 40, false},
		{"running, with a low id", 1, 45, false},
		{"the last one that ended", 120, 49, true},
		{"not begun", 1, 50, false},
		{"not begun, far away", 1, math.MaxUint64, false},
		{"committed between the first mark and the snapshot", 101, 49, true},
		{"began after the first mark, runs", 101, 51, false},
		{"above the sequence, although its transaction ended", 121, 42, false},
		{"from an archive of a younger server", 121, 3, false},
		{"from an archive of an older server", 119, 4_000_000_000, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := s.visible(tt.id, tt.xid); got != tt.visible {
				t.Errorf("visible: %v", got)
			}
		})
	}
	if nothing := sawNothing(); nothing.visible(1, 3) || nothing.visible(1, 1) || nothing.visible(0, 3) {
		t.Error("the beginning saw something")
	}
}

func TestBatchIsWhatTheSecondSnapshotAddsToTheFirst(t *testing.T) {
	b := batch{
		after: snapshot{low: 100, high: 120, xmax: 50, running: []uint64{40, 45}},
		upto:  snapshot{low: 150, high: 170, xmax: 60, running: []uint64{45, 55}},
	}
	tests := []struct {
		name string
		id   int64
		xid  uint64
		has  bool
	}{
		{"delivered before", 90, 42, false},
		{"ran at the first, committed since, id from long before", 2, 40, true},
		{"runs at both", 2, 45, false},
		{"began between, id below the first mark", 99, 52, true},
		{"began between", 140, 52, true},
		{"began between, still runs", 140, 55, false},
		{"began after the second", 160, 60, false},
		{"seen by the first, id between its marks", 110, 49, false},
		{"raised over", 121, 42, true},
		{"raised over, from an archive", 170, 3, true},
		{"not raised over", 171, 3, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := b.has(tt.id, tt.xid); got != tt.has {
				t.Errorf("has: %v", got)
			}
		})
	}
	if got := b.finished(); !slices.Equal(got, []uint64{40}) {
		t.Errorf("finished %v", got)
	}
}

func TestBatchIsQuietWhenNothingEnded(t *testing.T) {
	after := snapshot{low: 100, high: 120, xmax: 50, running: []uint64{40, 45}}
	tests := []struct {
		name  string
		upto  snapshot
		stray int64
		quiet bool
	}{
		{"nothing happened", after, 0, true},
		{"ids were drawn, nothing ended", snapshot{low: 130, high: 140, xmax: 50, running: []uint64{40, 45}}, 0, true},
		{"one of the list ended", snapshot{low: 100, high: 120, xmax: 50, running: []uint64{45}}, 0, false},
		{"a new one ended", snapshot{low: 100, high: 120, xmax: 51, running: []uint64{40, 45}}, 0, false},
		{"a new one ended, an older one began before it", snapshot{low: 100, high: 120, xmax: 52, running: []uint64{40, 45, 50}}, 0, false},
		{"a stray row under the mark", after, 120, true},
		{"a stray row above it", snapshot{low: 100, high: 121, xmax: 50, running: []uint64{40, 45}}, 121, false},
		{"another server, with the same numbers", snapshot{epoch: 1, low: 100, high: 120, xmax: 50, running: []uint64{40, 45}}, 0, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := batch{after: after, upto: tt.upto}
			if got := b.quiet(tt.stray); got != tt.quiet {
				t.Errorf("quiet: %v", got)
			}
		})
	}
}

func TestSnapshotsAreEqualWhenTheySeeTheSame(t *testing.T) {
	base := func() snapshot {
		return snapshot{epoch: 1, low: 1, high: 2, xmax: 50, running: []uint64{40, 45}}
	}
	same := base()
	if !same.equal(base()) {
		t.Error("not equal to itself")
	}
	for name, change := range map[string]func(*snapshot){
		"epoch": func(s *snapshot) { s.epoch++ }, "low": func(s *snapshot) { s.low++ }, "high": func(s *snapshot) { s.high++ },
		"xmax": func(s *snapshot) { s.xmax++ }, "running": func(s *snapshot) { s.running = s.running[1:] },
	} {
		other := base()
		change(&other)
		if same.equal(other) {
			t.Errorf("another %s is the same", name)
		}
	}
}

// What the first server's transaction ids say of the first server's rows holds there only.
func TestBatchCrossesToAnotherServer(t *testing.T) {
	b := batch{
		after: snapshot{epoch: 1, low: 100, high: 120, xmax: 900, running: []uint64{850, 899}},
		upto:  snapshot{epoch: 2, first: 151, low: 160, high: 170, xmax: 50, running: []uint64{45}},
	}
	tests := []struct {
		name string
		id   int64
		xid  uint64
		has  bool
	}{
		{"delivered before", 90, 842, false},
		{"delivered before, with an id that runs here", 90, 45, false},
		{"ran at the first, so it ended there", 90, 850, true},
		{"began there after the first", 99, 950, true},
		{"numbered there after the first", 130, 870, true},
		{"written here before the epoch", 150, 45, true},
		{"written here", 151, 48, true},
		{"runs here", 152, 45, false},
		{"begins here", 153, 50, false},
		{"above the mark", 171, 48, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := b.has(tt.id, tt.xid); got != tt.has {
				t.Errorf("has: %v", got)
			}
		})
	}
	if got := b.finished(); !slices.Equal(got, []uint64{850, 899}) {
		t.Errorf("finished %v", got)
	}
}

// batchReader delivers consecutive batches, each in the order of its ids, at some moment after its tick.
type batchReader struct {
	t       *testing.T
	h       *history
	after   snapshot
	reading *batch
	first   []*historyRow // what was in the batch right after the tick
	got     []*historyRow
}

func (r *batchReader) ticked(t tick) {
	if r.reading != nil {
		return
	}
	b := &batch{after: r.after, upto: t.snapshot}
	if b.quiet(t.stray) {
		for _, row := range r.h.members(b) {
			// A stray row that the sequence passed before it was probed waits for the next transaction to end, or the next probe.
			if row.id <= t.stray || row.id > r.h.drawn {
				r.t.Fatalf("quiet, but row %+v is in the batch of %+v", row, b)
			}
		}
		return
	}
	r.reading, r.first = b, r.h.members(b)
}

func (r *batchReader) finish() {
	b := r.reading
	if b == nil {
		return
	}
	rows := r.h.members(b)
	if !slices.Equal(rows, r.first) {
		r.t.Fatalf("the batch changed while it was read: %v, then %v", ids(r.first), ids(rows))
	}
	for _, row := range rows {
		// What the statements leave out: ids up to the mark but for late transactions, and what had ended before all that ran.
		if late := slices.Contains(b.finished(), row.xid) || row.xid >= b.after.xmax; row.id <= b.after.low && !late {
			r.t.Fatalf("row %+v lies below the mark of %+v and its transaction is not late", row, b)
		}
		if row.id <= b.after.high && row.xid < min(b.after.xmax, slices.Min(append(b.after.running, b.after.xmax))) {
			r.t.Fatalf("row %+v of %+v had ended before the oldest open transaction", row, b)
		}
	}
	r.got = append(r.got, rows...)
	r.after, r.reading = b.upto, nil
}

// marks is the highest id that counts as visible.
func (r *batchReader) marks() int64 {
	if r.reading != nil {
		return max(r.after.high, r.reading.upto.high)
	}
	return r.after.high
}

func ids(rows []*historyRow) []int64 {
	out := make([]int64, len(rows))
	for i, row := range rows {
		out[i] = row.id
	}
	return out
}

// numberReader is what everybody writes first: rows above the last id.
type numberReader struct{ got []*historyRow }

func (r *numberReader) poll(h *history) {
	last := int64(0)
	if len(r.got) > 0 {
		last = r.got[len(r.got)-1].id
	}
	r.got = append(r.got, h.committed(func(row *historyRow) bool { return row.id > last })...)
}

// gatedReader waits for every transaction older than a row, and reads by transaction.
type gatedReader struct{ got []*historyRow }

func (r *gatedReader) poll(h *history) {
	var last historyRow
	if len(r.got) > 0 {
		last = *r.got[len(r.got)-1]
	}
	oldest := h.oldest()
	rows := h.committed(func(row *historyRow) bool {
		return row.xid < oldest && (row.xid > last.xid || (row.xid == last.xid && row.id > last.id))
	})
	slices.SortStableFunc(rows, func(a, b *historyRow) int { return int(a.xid) - int(b.xid) })
	r.got = append(r.got, rows...)
}

// judge counts the committed rows that are missing, the deliveries too many, and those before a row of their key that was
// inserted, under its lock, earlier.
func judge(h *history, got []*historyRow) (lost, doubled, inverted int) {
	seen := map[*historyRow]bool{}
	for _, row := range got {
		if seen[row] {
			doubled++
			continue
		}
		seen[row] = true
		for _, before := range h.predecessors(row) {
			if !seen[before] {
				inverted++
				break
			}
		}
	}
	for _, row := range h.rows {
		if row.committed && !seen[row] {
			lost++
		}
	}
	return lost, doubled, inverted
}

// play runs one history with all three readers.
func play(t *testing.T, h *history) (ours, number, gated []*historyRow) {
	reader := &batchReader{t: t, h: h, after: sawNothing()}
	ticker := &ticker{history: h}
	var byNumber numberReader
	var byXid gatedReader
	for h.left() {
		if h.moves && h.roll(60) == 0 {
			h.move()
			ticker.restart(reader.marks())
		}
		switch h.roll(6) {
		case 0, 1, 2:
			h.event()
		case 3:
			if tick, ok := ticker.advance(); ok {
				reader.ticked(tick)
			}
		case 4:
			reader.finish()
		case 5:
			byNumber.poll(h)
			byXid.poll(h)
		}
	}
	h.settle()
	for range 2 {
		reader.finish()
		reader.ticked(ticker.whole())
	}
	reader.finish()
	byNumber.poll(h)
	byXid.poll(h)
	return reader.got, byNumber.got, byXid.got
}

func TestConsecutiveBatchesDeliverEveryRowOnceAndInCausalOrder(t *testing.T) {
	var rows, numberLost, gatedLost, gatedInverted int
	for seed := range uint64(300) {
		h := newHistory(randomDice(seed, 1000), false)
		ours, number, gated := play(t, h)
		if lost, doubled, inverted := judge(h, ours); lost+doubled+inverted > 0 {
			t.Fatalf("seed %d: lost %d, doubled %d, inverted %d", seed, lost, doubled, inverted)
		}
		rows += len(ours)
		lost, _, _ := judge(h, number)
		numberLost += lost
		lost, _, inverted := judge(h, gated)
		gatedLost, gatedInverted = gatedLost+lost, gatedInverted+inverted
	}
	t.Logf("%d rows; by number %d lost; by transaction %d lost, %d inverted", rows, numberLost, gatedLost, gatedInverted)
	if numberLost == 0 || gatedInverted == 0 || gatedLost > 0 {
		t.Error("the histories do not show what the other readers are known for")
	}
}

func TestConsecutiveBatchesDeliverStrayRowsOnce(t *testing.T) {
	strays := 0
	for seed := range uint64(300) {
		h := newHistory(randomDice(seed, 1000), true)
		ours, _, _ := play(t, h)
		if lost, doubled, inverted := judge(h, ours); lost+doubled+inverted > 0 {
			t.Fatalf("seed %d: lost %d, doubled %d, inverted %d", seed, lost, doubled, inverted)
		}
		for _, row := range h.rows {
			if row.xid < firstXid {
				strays++
			}
		}
	}
	if strays == 0 {
		t.Error("no row came from an archive")
	}
}

// Another server has the same rows and other transaction ids, and rows of its own before the first reader comes.
func TestConsecutiveBatchesGoOnOnAnotherServer(t *testing.T) {
	moved, numberLost, gatedLost := 0, 0, 0
	for seed := range uint64(300) {
		h := newHistory(randomDice(seed, 1000), seed%2 == 0)
		h.moves = true
		ours, number, gated := play(t, h)
		if lost, doubled, inverted := judge(h, ours); lost+doubled+inverted > 0 {
			t.Fatalf("seed %d: lost %d, doubled %d, inverted %d", seed, lost, doubled, inverted)
		}
		moved += h.moved
		lost, _, _ := judge(h, number)
		numberLost += lost
		lost, _, _ = judge(h, gated)
		gatedLost += lost
	}
	t.Logf("%d moves; by number %d lost; by transaction %d lost", moved, numberLost, gatedLost)
	if moved < 300 || gatedLost == 0 {
		t.Error("the histories do not show what the other reader is known for")
	}
}

func FuzzConsecutiveBatchesDeliverEveryRowOnce(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(randomDice(seed, 400).bytes, seed%2 == 0, seed%4 > 1)
	}
	f.Fuzz(func(t *testing.T, bytes []byte, strays, moves bool) {
		h := newHistory(&dice{bytes: bytes[:min(len(bytes), 2000)]}, strays)
		h.moves = moves
		ours, _, _ := play(t, h)
		if lost, doubled, inverted := judge(h, ours); lost+doubled+inverted > 0 {
			t.Fatalf("lost %d, doubled %d, inverted %d", lost, doubled, inverted)
		}
	})
}
