package pgoutbox

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestPositionIsReadAsItWasStored(t *testing.T) {
	far := snapshot{epoch: 3, low: math.MaxInt64 - 1, high: math.MaxInt64, xmax: math.MaxUint64, running: []uint64{5, 1 << 40, math.MaxUint64 - 1}}
	near := snapshot{epoch: 1, low: 100, high: 120, xmax: 50, running: []uint64{40}}
	none := snapshot{epoch: 1, low: 100, high: 120, xmax: 50}
	tests := []struct {
		name string
		at   position
	}{
		{"the beginning", between(sawNothing())},
		{"between two batches", between(near)},
		{"nothing running", between(none)},
		{"at the start of a batch", position{batch: &batch{after: near, upto: far}}},
		{"within a batch", position{batch: &batch{after: sawNothing(), upto: near}, last: 77}},
		{"large numbers", position{batch: &batch{after: far, upto: far}, last: math.MaxInt64 - 1}},
		{"at the end of a batch", position{batch: &batch{after: near, upto: far}, last: batchEnd}},
	}
	lists := [][]int64{{}, {7}, {9, 3, math.MaxInt64, math.MinInt64}}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if n := len(tt.at.args()); n != 9 {
				t.Fatalf("%d columns, the statement has 9", n)
			}
			for _, pending := range lists {
				got, err := parseStored(storedColumns(255, math.MaxInt64, tt.at, pending))
				if err != nil {
					t.Fatal(err)
				}
				if got.shard != 255 || got.term != math.MaxInt64 || !slices.Equal(got.pending, pending) {
					t.Errorf("got shard %d, term %d, pending %v", got.shard, got.term, got.pending)
				}
				if got.at.last != tt.at.last || !got.at.batch.upto.equal(tt.at.batch.upto) {
					t.Errorf("got %d of %+v, want %d of %+v", got.at.last, got.at.batch, tt.at.last, tt.at.batch)
				}
				// At the end of a batch it is the next one's beginning that is stored.
				if !tt.at.atEnd() && !got.at.batch.after.equal(tt.at.batch.after) {
					t.Errorf("got %+v, want %+v", got.at.batch.after, tt.at.batch.after)
				}
			}
		})
	}
}

func TestStoredPositionIsRefusedWhenItCannotBeRead(t *testing.T) {
	at := position{batch: &batch{after: sawNothing(), upto: snapshot{epoch: 1, low: 1, high: 2, xmax: 50}}, last: 1}
	good := func() [][]byte { return storedColumns(3, 7, at, []int64{1}) }
	if _, err := parseStored(good()); err != nil {
		t.Fatal(err)
	}
	if _, err := parseStored(good()[:15]); err == nil {
		t.Error("a row that lacks a column was read")
	}
	for i := range good() {
		for _, text := range []string{"", "x", "99999999999999999999"} {
			columns := good()
			columns[i] = []byte(text)
			got, err := parseStored(columns)
			if err == nil && (i != 11 || text != "") && i != 14 {
				t.Errorf("column %d as %q was read as %+v", i, text, got)
			}
			if err != nil && i > 1 && !strings.Contains(err.Error(), "shard 3") {
				t.Errorf("column %d: %v does not say of which shard", i, err)
			}
		}
	}
	for _, text := range []string{"{1,}", "{,}", "{1,NULL}", "{1.5}"} {
		columns := good()
		columns[11] = []byte(text)
		if got, err := parseStored(columns); err == nil {
			t.Errorf("pending %q was read as %v", text, got.pending)
		}
	}
}

// cursorRow is a row of the cursor table with the two statements that change it. TestCursorRowDoesWhatTheStatementsSay ties it
// to their text.
type cursorRow struct {
	at      []any
	pending []int64
}

const testToken = "token"

// statements are what stores a save, in the order in which they are sent.
func (v save) statements() []request {
	saves, _ := saveRequests("save", testToken, []save{v})
	return append(v.stages("stage", testToken), saves...)
}

// run does what the server does with a request. The slices are PostgreSQL's: a bound beyond the list is no error.
func (row *cursorRow) run(t *testing.T, r request) {
	t.Helper()
	if size := sizeOf(r); size > 2*saveBytes {
		t.Fatalf("a statement has %d bytes of parameters", size)
	}
	switch r.sql {
	case "stage":
		if fence := []any{int64(11), 3, int64(7), testToken}; !slices.Equal(r.args[:4], fence) {
			t.Fatalf("fence %v, want %v", r.args[:4], fence)
		}
		keep, more := min(r.args[4].(int), len(row.pending)), r.args[5].([]int64)
		row.pending = slices.Concat(row.pending[:keep], more)
	case "save":
		var columns []any
		for _, array := range r.args[1:] {
			columns = append(columns, array.([]any)[0])
		}
		if fence := []any{int64(11), 3, int64(7)}; r.args[0] != testToken || !slices.Equal(columns[:3], fence) {
			t.Fatalf("fence %v, %v, want %v", r.args[0], columns[:3], fence)
		}
		more, err := parseInt64Array(columns[13].(string))
		if err != nil {
			t.Fatal(err)
		}
		drop := min(columns[12].(int), len(row.pending))
		row.at, row.pending = columns[3:12], slices.Concat(row.pending[drop:], more)
	default:
		t.Fatalf("unknown statement %q", r.sql)
	}
}

func sizeOf(r request) int {
	size := 0
	for _, arg := range textArgs(r.args) {
		size += len(arg)
	}
	return size
}

func (row *cursorRow) load(t *testing.T) stored {
	t.Helper()
	out, err := parseStored(textArgs(slices.Concat([]any{3, int64(7)}, row.at, []any{row.pending, nil, 0, "", "f"})))
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestCursorRowDoesWhatTheStatementsSay(t *testing.T) {
	n, err := newNames("", "")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"stage": "SET pending = pending[: $5::integer] || $6::bigint[]\nWHERE",
		"save":  "pending = c.pending[v.dropped + 1 :] || v.pending::bigint[],\n",
	} {
		if text := n.query(name); !strings.Contains(text, want) {
			t.Errorf("%s.sql no longer says %q; the tests of store.go play the old statement:\n%s", name, want, text)
		}
	}
}

func TestSaveReplacesThePendingListWhateverItsLength(t *testing.T) {
	sizes := []int{0, 1, saveChunk - 1, saveChunk, saveChunk + 1, 2 * saveChunk, 2*saveChunk + 1, 10_000}
	for _, before := range sizes {
		for _, after := range sizes {
			row := &cursorRow{pending: numbered(1, before)}
			v := save{lead: testLead, at: between(sawNothing()), pending: numbered(100_000, after), stored: before}
			requests := v.statements()
			for i, r := range requests {
				if last := i == len(requests)-1; (r.sql == "save") != last {
					t.Fatalf("statement %d of %d is %q", i+1, len(requests), r.sql)
				}
				row.run(t, r)
			}
			if !slices.Equal(row.pending, v.pending) {
				t.Errorf("%d ids after %d: %d are stored", after, before, len(row.pending))
			}
			if want := 1 + (after+saveChunk-1)/saveChunk; after > saveChunk && len(requests) != want {
				t.Errorf("%d ids take %d statements, want %d", after, len(requests), want)
			}
			if after <= saveChunk && len(requests) != 1 {
				t.Errorf("%d ids take %d statements, and travel with a tick", after, len(requests))
			}
		}
	}
}

func TestSavesArePackedIntoFewStatementsOfBoundedSize(t *testing.T) {
	tests := []struct {
		name    string
		shards  int
		pending int
		running int
		most    int // statements
	}{
		{"nothing to save", 0, 0, 0, 0},
		{"one shard", 1, 0, 0, 1},
		{"idle shards", 16, 0, 0, 1},
		{"the largest consumer", 256, 0, 0, 16},
		{"shards with much in flight", 16, 64, 20, 8},
		{"as much in flight as fits", 16, saveChunk, 20, 16},
		{"hundreds of writers", 16, 10, 400, 32},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			upto := snapshot{epoch: 1, low: 1 << 40, high: 1<<40 + 10, xmax: 1 << 40}
			for i := range tt.running {
				upto.running = append(upto.running, 1<<39+uint64(i))
			}
			at := position{batch: &batch{after: upto, upto: upto}, last: 1<<40 - 3}
			var saves []save
			for shard := range tt.shards {
				pending := numbered(1<<40+1000*int64(shard), tt.pending)
				saves = append(saves, save{lead: &lead{consumer: 11, shard: shard, term: 7}, at: at, pending: pending})
			}
			requests, packs := saveRequests("save", testToken, saves)
			if len(requests) > tt.most || len(requests) != len(packs) {
				t.Errorf("%d statements for %d packs, want at most %d", len(requests), len(packs), tt.most)
			}
			for i, r := range requests {
				if size, limit := sizeOf(r), 2*saveBytes+4*len(upto.text()); size > limit {
					t.Errorf("statement %d has %d bytes of parameters, want at most %d", i, size, limit)
				}
				for _, array := range r.args[1:] {
					if n := len(array.([]any)); n != len(packs[i]) || n == 0 {
						t.Errorf("statement %d has an array of %d for %d saves", i, n, len(packs[i]))
					}
				}
				for j, v := range packs[i] {
					if r.args[2].([]any)[j] != v.lead.shard || r.args[14].([]any)[j] != string(int64Array(v.pending)) {
						t.Errorf("statement %d stores %v where the save is of shard %d", i, r.args[2].([]any)[j], v.lead.shard)
					}
				}
			}
			var again []save
			for _, pack := range packs {
				again = append(again, pack...)
			}
			if len(again) != len(saves) {
				t.Errorf("%d of %d saves are packed", len(again), len(saves))
			}
		})
	}
}

var testLead = &lead{consumer: 11, shard: 3, term: 7}

func numbered(from int64, n int) []int64 {
	out := make([]int64, n)
	for i := range out {
		out[i] = from + int64(i)
	}
	return out
}

// longShard is a cursor over many rows, stored through a cursorRow by statements that may fail, and loaded again after a crash
// between any two of them.
type longShard struct {
	*dice

	t      *testing.T
	batch  *batch
	rows   int64
	cursor *cursor
	trips  []*entry
	acked  map[int64]bool
	row    *cursorRow
	length int            // of the list that the row is known to hold
	sure   map[int64]bool // acked when the row was last stored as a whole
}

func newLongShard(t *testing.T, d *dice, rows int64) *longShard {
	b := &batch{after: sawNothing(), upto: snapshot{epoch: firstEpoch, low: rows, high: rows, xmax: 50}}
	s := &longShard{dice: d, t: t, batch: b, rows: rows, acked: map[int64]bool{}, sure: map[int64]bool{}}
	s.row = &cursorRow{at: position{batch: b}.args()}
	s.begin(s.row.load(t))
	return s
}

// begin is a term that starts from what is stored.
func (s *longShard) begin(from stored) {
	s.cursor, s.trips, s.length = newCursor(from.at), nil, len(from.pending)
	s.acked = map[int64]bool{}
	for id := range s.sure {
		s.acked[id] = true
	}
	seen := map[int64]bool{}
	for _, id := range from.pending {
		if seen[id] || !from.at.passed(id, 10) {
			continue
		}
		seen[id] = true
		e := &entry{record: record{id: id, xid: 10}}
		s.cursor.restore(e)
		s.trips = append(s.trips, e)
	}
	for id := from.at.last + 1; !from.at.atEnd() && id <= s.rows; id++ {
		e := &entry{record: record{id: id, xid: 10}}
		s.cursor.add(e, from.at.batch)
		s.trips = append(s.trips, e)
	}
	s.cursor.reach(position{from.at.batch, batchEnd})
	var want, got []int64
	for id := int64(1); id <= s.rows; id++ {
		if !s.sure[id] {
			want = append(want, id)
		}
	}
	for _, e := range s.trips {
		got = append(got, e.id)
	}
	if !slices.Equal(got, want) { // in the order of the ids, because that is how these rows were fetched first
		s.t.Fatalf("%d rows come again, not acked when the position was stored are %d\n%v\n%v", len(got), len(want), got, want)
	}
}

// work emits up to a row, and acks one in a few of those that are out.
func (s *longShard) work() {
	for _, e := range s.trips[:s.roll(256)*len(s.trips)/255] {
		s.cursor.emit(e)
	}
	one := int64(2 + s.roll(30))
	s.trips = slices.DeleteFunc(s.trips, func(e *entry) bool {
		if e.seq > s.cursor.frontSeq || e.id%one != 0 && len(s.trips) > 20 {
			return false
		}
		s.cursor.ack(e)
		s.acked[e.id] = true
		return true
	})
}

var errCrash = errors.New("crash")

// store sends a save; the statements after the first failure are not sent. errCrash: the process ends there, too.
func (s *longShard) store() error {
	at, pending := s.cursor.state()
	v := save{lead: testLead, at: at, pending: pending, stored: s.length, done: func(v save) { s.length = len(v.pending) }}
	for _, r := range v.statements() {
		switch s.roll(12) {
		case 0:
			return nil // refused, it is tried again
		case 1:
			return errCrash // before it arrived
		case 2:
			s.run(r)
			return errCrash // afterwards
		}
		s.run(r)
	}
	v.done(v)
	if !slices.Equal(s.row.pending, pending) {
		s.t.Fatalf("%d ids are stored, want %d", len(s.row.pending), len(pending))
	}
	return nil
}

func (s *longShard) run(r request) {
	s.row.run(s.t, r)
	if r.sql == "save" {
		s.sure = map[int64]bool{}
		for id := range s.acked {
			s.sure[id] = true
		}
	}
}

func TestSaveInPiecesLosesNothingWhereverItStops(t *testing.T) {
	crashes, staged := 0, 0
	for seed := range uint64(25) {
		for _, rows := range []int64{450, 2100} {
			s := newLongShard(t, randomDice(seed, 100), rows)
			for s.left() && len(s.trips) > 50 {
				s.work()
				if s.store() == nil {
					continue
				}
				crashes++
				from := s.row.load(t)
				if slices.ContainsFunc(from.pending, func(id int64) bool { return !from.at.passed(id, 10) }) {
					staged++
				}
				s.begin(from)
			}
		}
	}
	t.Logf("%d crashes, %d of them with ids stored ahead of their position", crashes, staged)
	if crashes < 100 || staged < 20 {
		t.Error("the game does not get to where it matters")
	}
}
