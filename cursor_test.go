package pgoutbox

import (
	"maps"
	"math"
	"slices"
	"testing"
)

// cursorOf returns a cursor that fetched rows with these ids from one batch.
func cursorOf(ids ...int64) (*cursor, map[int64]*entry) {
	b := &batch{after: sawNothing(), upto: snapshot{epoch: firstEpoch, low: 100, high: 100, xmax: 50}}
	c := newCursor(position{batch: b})
	entries := map[int64]*entry{}
	for _, id := range ids {
		entries[id] = &entry{record: record{id: id, xid: 10}}
		c.add(entries[id], b)
	}
	return c, entries
}

func TestCursorStoresTheFrontierAndWhatIsNotAckedBeforeIt(t *testing.T) {
	tests := []struct {
		name    string
		emit    []int64
		ack     []int64
		last    int64 // of the stored position
		pending []int64
	}{
		{"nothing went out", nil, nil, 0, []int64{}},
		{"one is out", []int64{1}, nil, 1, []int64{1}},
		{"one is done", []int64{1}, []int64{1}, 1, []int64{}},
		{"acks in order", []int64{1, 2, 3}, []int64{1, 2}, 3, []int64{3}},
		{"acks the other way round", []int64{1, 2, 3}, []int64{3, 2}, 3, []int64{1}},
		{"a gap in the middle", []int64{1, 2, 3}, []int64{1, 3}, 3, []int64{2}},
		{"those behind a blocked key are pending although they never went out", []int64{1, 4}, []int64{4}, 4, []int64{1, 2, 3}},
		{"the last one went out first", []int64{5}, []int64{5}, math.MaxInt64, []int64{1, 2, 3, 4}},
		{"everything went out: the position is where the fetch stands", []int64{1, 2, 3, 4, 5}, []int64{2, 4}, math.MaxInt64, []int64{1, 3, 5}},
		{"a nacked one goes out again", []int64{1, 2, 1}, []int64{2}, 2, []int64{1}},
		{"one ceased to exist before it went out", []int64{1}, []int64{1, 2}, 1, []int64{}},
		{"one ceased to exist at the frontier", []int64{3}, []int64{3, 4, 5}, 3, []int64{1, 2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, entries := cursorOf(1, 2, 3, 4, 5)
			c.reach(position{c.fetched.batch, batchEnd})
			for _, id := range tt.emit {
				c.emit(entries[id])
			}
			for _, id := range tt.ack {
				c.ack(entries[id])
			}
			at, pending := c.state()
			if at.last != tt.last || !slices.Equal(pending, tt.pending) || pending == nil {
				t.Errorf("frontier %d, pending %v; want %d, %v", at.last, pending, tt.last, tt.pending)
			}
			if want := 5 - len(tt.ack); c.unacked != want {
				t.Errorf("%d not acked, want %d", c.unacked, want)
			}
		})
	}
}

// Once everything has gone out the stored position is where the fetch stands. The next row must not take it back to the last
// row that went out, not even if an ack of an earlier one is stored before it goes out itself.
func TestCursorsStoredPositionStaysAheadWhenTheNextRowIsFetched(t *testing.T) {
	c, entries := cursorOf(1, 2)
	c.reach(position{c.fetched.batch, batchEnd})
	c.emit(entries[1])
	c.emit(entries[2])
	stored, _ := c.state()
	c.add(&entry{record: record{id: 150, xid: 55}}, &batch{after: c.fetched.batch.upto, upto: snapshot{epoch: firstEpoch, low: 200, high: 200, xmax: 60}})
	c.ack(entries[1])
	at, pending := c.state()
	if at != stored || !slices.Equal(pending, []int64{2}) {
		t.Errorf("the position went from %+v to %+v, pending %v", stored, at, pending)
	}
}

func TestCursorStoresNothingNewWhileOnlyReadingGoesOn(t *testing.T) {
	c, entries := cursorOf(1, 2)
	c.emit(entries[1])
	changes := c.changes
	b := &batch{after: c.fetched.batch.upto, upto: snapshot{epoch: firstEpoch, low: 200, high: 200, xmax: 60}}
	c.reach(position{c.fetched.batch, batchEnd})
	c.reach(position{b, 0})
	c.add(&entry{record: record{id: 150, xid: 55}}, b)
	at, pending := c.state()
	if c.changes != changes || at.last != 1 || at.batch == b || !slices.Equal(pending, []int64{1}) {
		t.Errorf("%d changes, frontier %d, pending %v", c.changes-changes, at.last, pending)
	}
	c.emit(entries[2])
	if at, _ := c.state(); at.last != 2 || at.batch == b {
		t.Errorf("the frontier is not in the batch of its row: %+v", at)
	}
	if c.changes == changes {
		t.Error("an emission changed nothing")
	}
	if c, entries := cursorOf(1); c.fetched.last != 1 {
		t.Errorf("a row was added, and the fetch stands at %d", c.fetched.last)
	} else if c.emit(entries[1]); c.front.last != 1 {
		t.Errorf("the frontier is at %d", c.front.last)
	}
}

// cursorGame plays a shard's cursor against a twin that keeps, in full sets, which rows were acked when. Transactions go on
// meanwhile, so rows come late, and the process crashes and starts from what it stored.
type cursorGame struct {
	*history

	t      testing.TB
	ticker *ticker
	cursor *cursor
	tick   tick
	ticked uint64

	// The twin.
	begun map[int64]bool // acked when the position was stored that this term began with
	order []*trip        // what this term took over, as it was emitted or will be
	front int            // of order, how many are at or before the furthest one that went out
	acked map[int64]bool // acked, ever, as far as this term knows
	out   map[int64]bool // went out, ever

	saves            []savedGame // of this term; the first is the one it began with
	crashes, repeats int
	sizes            map[int]int // how many ids a save had, how often
}

// trip is one row on its way through a term.
type trip struct {
	*entry

	row   *historyRow
	out   bool
	acked bool
}

type savedGame struct {
	columns [][]byte
	acked   map[int64]bool
}

func newCursorGame(t testing.TB, d *dice) *cursorGame {
	h := newHistory(d, d.roll(2) == 0)
	h.moves = true
	g := &cursorGame{
		history: h, t: t, ticker: &ticker{history: h}, cursor: newCursor(between(sawNothing())),
		begun: map[int64]bool{}, acked: map[int64]bool{}, out: map[int64]bool{}, sizes: map[int]int{},
	}
	g.save()
	return g
}

// play takes one step: of the transactions more often than of the reader, so that there is something to do.
func (g *cursorGame) play() {
	switch g.roll(16) {
	case 0, 1, 2, 3:
		g.event()
	case 4, 5:
		if tick, ok := g.ticker.advance(); ok {
			g.tick = tick
		}
	case 6, 7, 8:
		g.fetch(1 + g.roll(5))
	case 9, 10:
		g.emit(g.roll(8))
	case 11, 12:
		g.ack(g.roll(8))
	case 13:
		switch g.roll(4) {
		case 0:
			g.vanish(g.roll(8))
		default:
			g.nack(g.roll(8))
		}
	case 14:
		g.save()
	case 15:
		if g.roll(4) == 0 {
			g.crash(g.saves[len(g.saves)-1-g.roll(min(len(g.saves), 3))])
		}
	}
}

// mine says that a row belongs to the shard: its scan sees the rows of others too.
func (row *historyRow) mine() bool { return row.key != "c" }

// fetch reads the next rows of the batch, or begins the next batch, and stops between or after rows, as pages do.
func (g *cursorGame) fetch(limit int) {
	at := g.cursor.fetched
	if at.atEnd() {
		b := &batch{after: at.batch.upto, upto: g.tick.snapshot}
		if g.tick.n <= g.ticked {
			return
		}
		g.ticked = g.tick.n
		if !b.quiet(g.tick.stray) {
			g.cursor.reach(position{batch: b})
		}
		return
	}
	rows := g.committed(func(row *historyRow) bool { return row.id > at.last && at.batch.has(row.id, row.xid) })
	to := position{at.batch, batchEnd}
	if len(rows) > limit {
		rows = rows[:limit]
		to.last = rows[limit-1].id
	}
	for _, row := range rows {
		if row.mine() {
			e := &entry{record: record{id: row.id, xid: row.xid}}
			g.cursor.add(e, at.batch)
			g.take(e, row)
		}
	}
	g.cursor.reach(to)
}

// take notes that the cursor took over a row.
func (g *cursorGame) take(e *entry, row *historyRow) {
	if g.begun[row.id] {
		g.t.Fatalf("row %d comes again although its ack was stored", row.id)
	}
	if slices.ContainsFunc(g.order, func(other *trip) bool { return other.row == row }) {
		g.t.Fatalf("row %d comes twice in one term", row.id)
	}
	if g.out[row.id] {
		g.repeats++
	}
	g.order = append(g.order, &trip{entry: e, row: row})
}

// pick returns the n-th of the trips that satisfy want, counted round; nil when there is none.
func (g *cursorGame) pick(n int, want func(int, *trip) bool) (int, *trip) {
	var found []int
	for i, tr := range g.order {
		if !tr.acked && want(i, tr) {
			found = append(found, i)
		}
	}
	if len(found) == 0 {
		return 0, nil
	}
	i := found[n%len(found)]
	return i, g.order[i]
}

// mayGo says that nothing of the row's key stands before it.
func (g *cursorGame) mayGo(i int, tr *trip) bool {
	return !tr.out && (tr.row.key == "" || !slices.ContainsFunc(g.order[:i], func(other *trip) bool {
		return !other.acked && other.row.key == tr.row.key
	}))
}

func (g *cursorGame) emit(n int) {
	i, tr := g.pick(n, g.mayGo)
	if tr == nil {
		return
	}
	for _, before := range g.predecessors(tr.row) {
		if !g.acked[before.id] && !before.deleted {
			g.t.Fatalf("row %d went out before row %d of its key was done with", tr.row.id, before.id)
		}
	}
	g.cursor.emit(tr.entry)
	tr.out = true
	g.out[tr.row.id] = true
	g.front = max(g.front, i+1)
}

func (g *cursorGame) ack(n int) {
	_, tr := g.pick(n, func(_ int, tr *trip) bool { return tr.out })
	if tr == nil {
		return
	}
	g.cursor.ack(tr.entry)
	tr.acked = true
	g.acked[tr.row.id] = true
}

// nack has a row go out again some time.
func (g *cursorGame) nack(n int) {
	if _, tr := g.pick(n, func(_ int, tr *trip) bool { return tr.out }); tr != nil {
		tr.out = false
	}
}

// vanish deletes a row whose turn it is and that is not out.
func (g *cursorGame) vanish(n int) {
	if _, tr := g.pick(n, g.mayGo); tr != nil {
		tr.row.deleted = true
		g.cursor.ack(tr.entry)
		tr.acked = true
	}
}

func (g *cursorGame) save() {
	at, pending := g.cursor.state()
	var want []int64
	passed := maps.Clone(g.begun)
	for _, tr := range g.order[:g.front] {
		passed[tr.row.id] = true
		if !tr.acked {
			want = append(want, tr.row.id)
		}
	}
	if !slices.Equal(pending, want) {
		g.t.Fatalf("pending %v, the rows not acked before the frontier are %v", pending, want)
	}
	g.sizes[len(pending)]++
	for _, row := range g.rows {
		if row.mine() && !row.aborted && !row.deleted && at.passed(row.id, row.xid) != passed[row.id] {
			g.t.Fatalf("row %+v lies at or before %+v of %+v: want %v", row, at.last, at.batch, passed[row.id])
		}
	}
	g.saves = append(g.saves, savedGame{storedColumns(3, 7, at, pending), maps.Clone(g.acked)})
}

// storedColumns is what take_over returns of a position that was stored.
func storedColumns(shard int, term int64, at position, pending []int64) [][]byte {
	return textArgs(slices.Concat([]any{shard, term}, at.args(), []any{pending, int64(5), 2, "owner", "t"}))
}

// crash forgets everything but what was stored, and begins a term with it as admit does.
func (g *cursorGame) crash(from savedGame) {
	row, err := parseStored(from.columns)
	if err != nil {
		g.t.Fatal(err)
	}
	if again := storedColumns(row.shard, row.term, row.at, row.pending); !slices.EqualFunc(again, from.columns, slices.Equal) {
		g.t.Fatalf("%q was read and stored again as %q", from.columns, again)
	}
	g.crashes++
	if g.roll(3) == 0 {
		g.move()
	}
	now, err := parseSnapshot(g.history.snapshot())
	if err != nil {
		g.t.Fatal(err)
	}
	if err := (&leadership{epochs: g.epochs}).date(row.at, now.xmax); err != nil {
		g.t.Fatal(err)
	}
	g.ticker.restart(max(row.at.batch.after.high, row.at.batch.upto.high))
	g.tick, g.ticked = tick{}, g.ticker.n
	g.begun, g.acked = maps.Clone(from.acked), maps.Clone(from.acked)
	g.cursor, g.order = newCursor(row.at), nil
	for _, id := range row.pending {
		found := g.byID[id]
		if found == nil || found.deleted {
			continue
		}
		if !row.at.passed(found.id, found.xid) {
			g.t.Fatalf("pending row %d is yet to come", id)
		}
		e := &entry{record: record{id: found.id, xid: found.xid}}
		g.cursor.restore(e)
		g.take(e, found)
	}
	g.front = len(g.order)
	g.saves = []savedGame{from}
}

// finish lets every transaction end, and everything be fetched, emitted and acked.
func (g *cursorGame) finish() {
	g.settle()
	for range 2 {
		g.tick = g.ticker.whole()
		for range 2 {
			for !g.cursor.fetched.atEnd() {
				g.fetch(5)
			}
			g.fetch(5)
		}
	}
	for {
		before := g.cursor.changes
		g.emit(0)
		g.ack(0)
		if g.cursor.changes == before {
			break
		}
	}
	g.save()
	for _, row := range g.rows {
		if row.mine() && row.committed && !row.deleted && !g.acked[row.id] {
			g.t.Fatalf("row %+v never came", row)
		}
	}
	if at, pending := g.cursor.state(); g.cursor.unacked != 0 || len(pending) != 0 || g.cursor.head != nil || g.cursor.tail != nil {
		g.t.Fatalf("at the end %d rows are not acked, pending %v at %+v", g.cursor.unacked, pending, at)
	}
}

func FuzzCursorRepeatsWhatWasNotAckedWhenItWasStored(f *testing.F) {
	for seed := range uint64(4) {
		f.Add(randomDice(seed, 300).bytes)
	}
	f.Fuzz(func(t *testing.T, bytes []byte) {
		g := newCursorGame(t, &dice{bytes: bytes[:min(len(bytes), 3000)]})
		for g.left() {
			g.play()
		}
		g.finish()
		g.crash(g.saves[g.roll(len(g.saves))])
		g.finish()
	})
}

func TestCursorRepeatsWhatWasNotAckedWhenItWasStored(t *testing.T) {
	var rows, crashes, moves, repeats int
	sizes := map[int]int{}
	for seed := range uint64(40) {
		g := newCursorGame(t, randomDice(seed, 3000))
		for g.left() {
			g.play()
		}
		g.finish()
		rows, crashes, moves, repeats = rows+len(g.out), crashes+g.crashes, moves+g.moved, repeats+g.repeats
		for size, n := range g.sizes {
			sizes[size] += n
		}
	}
	t.Logf("%d rows, %d crashes, %d moves, %d repeats, sizes of saves %v", rows, crashes, moves, repeats, sizes)
	if crashes == 0 || moves == 0 || repeats == 0 || sizes[0] == 0 || len(sizes) < 5 {
		t.Error("the game does not get to where it matters")
	}
}
