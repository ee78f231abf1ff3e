package pgoutbox

import (
	"slices"
	"strconv"
	"testing"
)

func TestQueueHandsOutOneRowOfAKeyAtATime(t *testing.T) {
	keyed := func(id int64, key string) *entry {
		return &entry{record: record{id: id, key: key, hasKey: true}, loaded: true}
	}
	q := newQueue(OrderByKey)
	a1, a2, b1 := keyed(1, "a"), keyed(2, "a"), keyed(3, "b")
	empty1, empty2 := keyed(4, ""), keyed(5, "")
	free1, free2 := &entry{record: record{id: 6}, loaded: true}, &entry{record: record{id: 7}, loaded: true}
	for _, e := range []*entry{a1, a2, b1, empty1, empty2, free1, free2} {
		q.push(e)
	}
	var got []int64
	for e := q.pop(); e != nil; e = q.pop() {
		got = append(got, e.id)
	}
	// The empty key is a key, no key is none.
	if want := []int64{1, 3, 4, 6, 7}; !slices.Equal(got, want) {
		t.Fatalf("went out %v, want %v", got, want)
	}
	q.done(b1)
	q.done(free1)
	if e := q.pop(); e != nil {
		t.Fatalf("row %d went out before the one before it was done with", e.id)
	}
	q.delay(a1)
	q.done(empty1)
	if e := q.pop(); e != empty2 {
		t.Fatalf("got %v, want the second of the empty key", e)
	}
	q.resume(a1)
	if e := q.pop(); e != a1 {
		t.Fatalf("got %v, want the delayed row again, before its successor", e)
	}
	q.done(a1)
	if e := q.pop(); e != a2 {
		t.Fatalf("got %v, want the successor", e)
	}
	q.done(a2)
	q.done(empty2)
	q.done(free2)
	if len(q.lanes) != 0 || q.waiting != 0 {
		t.Errorf("%d keys and %d waiting rows are remembered for nothing", len(q.lanes), q.waiting)
	}
}

func TestQueueIsOneLaneUnderOrderByShard(t *testing.T) {
	q := newQueue(OrderByShard)
	rows := []*entry{
		{record: record{id: 1, key: "a", hasKey: true}, loaded: true},
		{record: record{id: 2}, loaded: true},
		{record: record{id: 3, key: "b", hasKey: true}, loaded: true},
	}
	for _, e := range rows {
		q.push(e)
	}
	for _, want := range rows {
		if e := q.pop(); e != want {
			t.Fatalf("got %v, want row %d", e, want.id)
		}
		if e := q.pop(); e != nil {
			t.Fatalf("row %d went out beside row %d", e.id, want.id)
		}
		q.done(want)
	}
}

func TestQueueFollowsWithinOneTopicAndKey(t *testing.T) {
	tests := []struct {
		name string
		next *entry
		ok   bool
	}{
		{"the same topic", &entry{record: record{topic: "t", key: "a", hasKey: true}, loaded: true}, true},
		{"another topic", &entry{record: record{topic: "u", key: "a", hasKey: true}, loaded: true}, false},
		{"another key", &entry{record: record{topic: "t", key: "b", hasKey: true}, loaded: true}, false},
		{"a payload that is not here", &entry{record: record{topic: "t", key: "a", hasKey: true}}, false},
		{"nothing", nil, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			q := newQueue(OrderByKey)
			q.push(&entry{record: record{topic: "t", key: "a", hasKey: true}, loaded: true})
			if tt.next != nil {
				q.push(tt.next)
			}
			if got := q.follow(q.pop()); (got != nil) != tt.ok {
				t.Errorf("got %v", got)
			}
		})
	}
}

// queueGame plays a queue against a twin that keeps every row in one list and looks through it each time.
type queueGame struct {
	*dice

	t       *testing.T
	queue   *queue
	rows    []*queuedRow // not done, in the order they came
	ready   []*queuedRow // in the order in which their turn came
	unread  []*queuedRow
	pushed  int64
	follows int
}

type queuedRow struct {
	*entry

	lane  string // "": no order
	state string // waiting, ready, unread, reading, out, delayed
}

func (g *queueGame) push() {
	g.pushed++
	key := []string{"", "a", "b", "c"}[g.roll(4)]
	e := &entry{record: record{id: g.pushed, key: key, hasKey: key != "", topic: "t" + strconv.Itoa(g.roll(8)/7)}, loaded: g.roll(4) > 0}
	row := &queuedRow{entry: e, lane: key, state: "waiting"}
	if g.queue.oneLane {
		row.lane = "one"
	}
	g.rows = append(g.rows, row)
	g.queue.push(e)
	g.turn(row)
}

// turn notes a row whose turn has come, if it has.
func (g *queueGame) turn(row *queuedRow) {
	if row.lane != "" && g.before(row) != nil {
		return
	}
	if row.loaded {
		row.state = "ready"
		g.ready = append(g.ready, row)
	} else {
		row.state = "unread"
		g.unread = append(g.unread, row)
	}
}

// before and behind return the row's neighbours in its lane.
func (g *queueGame) before(row *queuedRow) *queuedRow {
	var last *queuedRow
	for _, other := range g.rows {
		if other == row {
			break
		}
		if other.lane == row.lane {
			last = other
		}
	}
	return last
}

func (g *queueGame) behind(row *queuedRow) *queuedRow {
	if row.lane == "" {
		return nil
	}
	for _, other := range g.rows[slices.Index(g.rows, row)+1:] {
		if other.lane == row.lane {
			return other
		}
	}
	return nil
}

func (g *queueGame) pick(want func(*queuedRow) bool) *queuedRow {
	var found []*queuedRow
	for _, row := range g.rows {
		if want(row) {
			found = append(found, row)
		}
	}
	if len(found) == 0 {
		return nil
	}
	return found[g.roll(len(found))]
}

// first says that a row is out and everything before it in its lane is done with.
func (g *queueGame) first(row *queuedRow) bool {
	return row.state == "out" && (row.lane == "" || g.before(row) == nil)
}

func (g *queueGame) play() {
	switch g.roll(8) {
	case 0, 1:
		g.push()
	case 2, 3:
		if row := g.expect(g.queue.pop(), &g.ready, "out"); row != nil {
			row.loaded = false // the payload goes out too
			for g.roll(2) == 0 && g.follow(row) {
				row = g.behind(row)
			}
		}
	case 4:
		if row := g.expect(g.queue.popUnread(), &g.unread, "reading"); row != nil {
			for next := g.behind(row); next != nil && g.roll(2) == 0; next = g.behind(next) {
				next.loaded = true // read with it
			}
		}
	case 5:
		if row := g.pick(func(row *queuedRow) bool { return row.state == "reading" }); row != nil {
			row.loaded = true
			g.queue.release(row.entry)
			g.turn(row)
		}
	case 6:
		g.settle()
	case 7:
		if row := g.pick(func(row *queuedRow) bool { return row.state == "delayed" }); row != nil {
			g.queue.resume(row.entry)
			g.turn(row)
		}
	}
	g.check()
}

func (g *queueGame) expect(e *entry, from *[]*queuedRow, state string) *queuedRow {
	if len(*from) == 0 {
		if e != nil {
			g.t.Fatalf("row %d came out of turn", e.id)
		}
		return nil
	}
	row := (*from)[0]
	if e != row.entry {
		g.t.Fatalf("got %v, want row %d", e, row.id)
	}
	*from = (*from)[1:]
	row.state = state
	return row
}

func (g *queueGame) follow(row *queuedRow) bool {
	next := g.behind(row)
	follows := next != nil && next.loaded && next.topic == row.topic
	got := g.queue.follow(row.entry)
	if (got != nil) != follows || (follows && got != next.entry) {
		g.t.Fatalf("row %d is followed by %v, want %v", row.id, got, next)
	}
	if follows {
		g.follows++
		next.state, next.loaded = "out", false
	}
	return follows
}

// settle ends the turn of a row that is out: for good, or for a while, and then what followed it goes back behind it.
func (g *queueGame) settle() {
	row := g.pick(g.first)
	if row == nil {
		return
	}
	if g.roll(3) > 0 {
		next := g.behind(row)
		g.queue.done(row.entry)
		g.rows = slices.DeleteFunc(g.rows, func(other *queuedRow) bool { return other == row })
		if next != nil && next.state == "waiting" {
			g.turn(next)
		}
		return
	}
	g.queue.delay(row.entry)
	row.state = "delayed"
	for next := g.behind(row); next != nil && next.state == "out"; row, next = next, g.behind(next) {
		g.queue.rejoin(next.entry)
		next.state = "waiting"
	}
}

func (g *queueGame) check() {
	waiting, lanes := 0, map[string]bool{}
	for _, row := range g.rows {
		if row.state == "waiting" || row.state == "delayed" {
			waiting++
		}
		if row.lane != "" {
			lanes[row.lane] = true
		}
	}
	if g.queue.waiting != waiting || len(g.queue.lanes) != len(lanes) {
		g.t.Fatalf("%d wait in %d lanes, want %d in %d", g.queue.waiting, len(g.queue.lanes), waiting, len(lanes))
	}
	if g.queue.ready.len() != len(g.ready) || g.queue.unread.len() != len(g.unread) {
		g.t.Fatalf("%d ready, %d unread, want %d, %d", g.queue.ready.len(), g.queue.unread.len(), len(g.ready), len(g.unread))
	}
}

func TestQueueAgreesWithATwinThatLooksThroughEverything(t *testing.T) {
	for _, ordering := range []Ordering{OrderByKey, OrderByShard} {
		follows := 0
		for seed := range uint64(20) {
			g := &queueGame{dice: randomDice(seed, 2000), t: t, queue: newQueue(ordering)}
			for g.left() {
				g.play()
			}
			follows += g.follows
		}
		if follows < 100 {
			t.Errorf("only %d rows followed another", follows)
		}
	}
}

func FuzzQueueAgreesWithATwinThatLooksThroughEverything(f *testing.F) {
	for seed := range uint64(2) {
		f.Add(randomDice(seed, 200).bytes, seed == 0)
	}
	f.Fuzz(func(t *testing.T, bytes []byte, byShard bool) {
		g := &queueGame{dice: &dice{bytes: bytes[:min(len(bytes), 2000)]}, t: t, queue: newQueue(OrderByKey)}
		g.queue.oneLane = byShard
		for g.left() {
			g.play()
		}
	})
}

func TestFifoReusesItsMemory(t *testing.T) {
	var f fifo
	in, out := int64(0), int64(0)
	d := randomDice(1, 40_000)
	for d.left() {
		for range d.roll(12) {
			if f.len() < 100 {
				in++
				f.push(&entry{record: record{id: in}})
			}
		}
		for range d.roll(12) {
			head := f.peek()
			e := f.pop()
			if e != head || (e == nil) != (in == out) {
				t.Fatalf("pop %v after peek %v, %d in, %d out", e, head, in, out)
			}
			if e != nil {
				if out++; e.id != out {
					t.Fatalf("row %d came, want %d", e.id, out)
				}
			}
		}
	}
	if in < 50_000 || cap(f.rows) > 1024 {
		t.Errorf("room for %d rows after %d, of which never more than 100 at a time", cap(f.rows), in)
	}
	for i, e := range f.rows[:cap(f.rows)] {
		if (i < f.head || i >= len(f.rows)) && e != nil {
			t.Fatalf("row %d is held although it went out", e.id)
		}
	}
}
