package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// newTestShard returns a shard of a reader that has neither workers nor a server.
func newTestShard(ordering Ordering, window, outMost int) *shard {
	cfg := readerConfig{
		ordering: ordering, window: window, outMost: outMost, staffMost: func(int) int { return 0 },
		nackDelay: time.Millisecond, nackMost: time.Second,
	}
	r := newReader(cfg, &leadership{}, nil)
	sh := &shard{lead: &lead{shard: 3, term: 7}, reader: r, cursor: newCursor(between(sawNothing())), queue: newQueue(ordering)}
	sh.parkedKeys, sh.freeing = map[string]bool{}, map[string]bool{}
	r.shards[sh.shard] = sh
	return sh
}

// fetched queues rows given as "key topic", in this order; "-" is no key.
func (sh *shard) fetched(rows ...string) {
	b := &batch{after: sawNothing(), upto: snapshot{high: 1 << 40, xmax: 1 << 40}}
	for _, row := range rows {
		key, topic, _ := strings.Cut(row, " ")
		e := &entry{record: record{id: int64(sh.cursor.lastSeq) + 1, xid: 5, key: key, hasKey: key != "-", topic: topic, payload: []byte(row)}}
		e.size, e.loaded = len(e.payload), true
		sh.cursor.add(e, b)
		sh.enqueue(e)
	}
}

func TestTakeKeepsRowsOfOneKeyBehindEachOther(t *testing.T) {
	tests := []struct {
		name    string
		rows    []string
		limit   int
		outMost int
		want    []string // ids; 2<1: row 2 waits for row 1
	}{
		{"one at a time", []string{"a t", "b t"}, 1, 10, []string{"1"}},
		{"other keys side by side", []string{"a t", "b t", "- t", "- t"}, 10, 10, []string{"1", "2", "3", "4"}},
		{"the same key behind each other", []string{"a t", "b t", "a t", "a t"}, 10, 10, []string{"1", "3<1", "4<3", "2"}},
		{"the limit cuts a key's rows", []string{"a t", "a t", "a t"}, 2, 10, []string{"1", "2<1"}},
		{"as many as may be out", []string{"a t", "b t", "c t"}, 10, 2, []string{"1", "2"}},
		{"another topic stays behind", []string{"a t", "a u", "b u"}, 10, 10, []string{"1", "3"}},
		{"and so does what comes behind it", []string{"a t", "a u", "a t"}, 10, 10, []string{"1"}},
		{"nothing there", nil, 10, 10, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sh := newTestShard(OrderByKey, 100, tt.outMost)
			sh.fetched(tt.rows...)
			var got []string
			for _, f := range sh.take(tt.limit, tt.outMost) {
				id := fmt.Sprint(f.id)
				if f.prev != nil {
					id += fmt.Sprintf("<%d", f.prev.id)
				}
				got = append(got, id)
			}
			if !slices.Equal(got, tt.want) || sh.out != len(tt.want) {
				t.Errorf("took %v, %d out, want %v", got, sh.out, tt.want)
			}
		})
	}
}

func TestTakeSendsWhatFailedAlone(t *testing.T) {
	sh := newTestShard(OrderByKey, 100, 100)
	sh.fetched("a t", "b t", "c t", "a t")
	for _, f := range sh.take(10, 10) {
		if f.prev == nil {
			sh.queue.delay(f.entry)
		} else {
			sh.queue.rejoin(f.entry)
		}
		sh.out--
		f.entry.loaded = true
	}
	sh.fetched("d t")
	for e := sh.cursor.head; e.id < 4; e = e.next {
		sh.queue.resume(e)
	}
	var runs [][]int64
	for {
		var run []int64
		for _, f := range sh.take(10, 10) {
			run = append(run, f.id)
			sh.queue.done(f.entry)
		}
		if run == nil {
			break
		}
		runs = append(runs, run)
	}
	if got, want := fmt.Sprint(runs), "[[5] [1] [2] [3] [4]]"; got != want {
		t.Errorf("runs %v, want %v: nothing that failed shares a run", got, want)
	}
}

func TestAttemptsShareNothing(t *testing.T) {
	sh := newTestShard(OrderByKey, 100, 10)
	sh.fetched("a t")
	first := sh.take(1, 10)[0]
	if first.row().Attempt != 1 || string(first.payload) != "a t" {
		t.Fatalf("first attempt %+v, payload %q", first.row(), first.payload)
	}
	if first.entry.payload != nil || first.entry.loaded {
		t.Fatal("the row keeps the payload that its receiver may change")
	}
	first.payload[0] = 'X'
	sh.reader.leave(first)
	sh.queue.delay(first.entry)
	sh.queue.resume(first.entry)
	if run := sh.take(1, 10); run != nil {
		t.Fatalf("%v goes out without its payload", run)
	}
	small, _ := sh.reader.unread()
	if len(small) != 1 {
		t.Fatalf("%d rows are read again", len(small))
	}
	sh.reader.loaded(small[0], &entry{record: record{id: 1, xid: 5, payload: []byte("a t")}, loaded: true})
	second := sh.take(1, 10)[0]
	want := Row{ID: 1, Shard: 3, Term: 7, Topic: "t", Key: "a", Attempt: 2}
	if second.row() != want || string(second.payload) != "a t" {
		t.Errorf("second attempt %+v, payload %q", second.row(), second.payload)
	}
}

func TestShardHoldsTheFirstPayloadsOnly(t *testing.T) {
	sh := newTestShard(OrderByKey, 10*holdMost, 10*holdMost)
	rows := slices.Repeat([]string{"- t"}, holdMost+500)
	sh.fetched(rows...)
	if sh.held != holdMost || sh.queue.ready.len() != holdMost || sh.queue.unread.len() != 500 {
		t.Fatalf("%d held, %d ready, %d unread", sh.held, sh.queue.ready.len(), sh.queue.unread.len())
	}
	if n := len(sh.take(100, 10*holdMost)); n != 100 || sh.held != holdMost-100 {
		t.Fatalf("took %d, %d held", n, sh.held)
	}
	sh.fetched(rows[:200]...)
	if sh.held != holdMost || sh.queue.unread.len() != 600 {
		t.Errorf("%d held, %d unread", sh.held, sh.queue.unread.len())
	}
}

func TestSaveIsDueAfterWorkAndSeldomWithout(t *testing.T) {
	start := time.Now()
	sh := newTestShard(OrderByKey, 100, 10)
	at, _ := sh.cursor.state()
	sh.savedAt, sh.savedTime = at, start
	if _, ok := sh.save(start.Add(2*time.Hour), time.Hour); ok {
		t.Fatal("nothing happened, and it is stored")
	}
	sh.fetched("a t", "b t")
	sh.cursor.reach(position{sh.cursor.fetched.batch, batchEnd})
	if v, ok := sh.save(start.Add(time.Second), time.Hour); ok {
		t.Fatalf("only reading went on, and %+v is stored", v)
	}
	run := sh.take(2, 10)
	v, ok := sh.save(start.Add(time.Second), time.Hour)
	if !ok || !slices.Equal(v.pending, []int64{1, 2}) || !v.at.atEnd() {
		t.Fatalf("two rows are out: %v %+v", ok, v)
	}
	sh.reader.settled(run[0])
	v.done(v)
	if v, ok = sh.save(start.Add(time.Second), time.Hour); !ok || !slices.Equal(v.pending, []int64{2}) || v.stored != 2 {
		t.Fatalf("an ack came while the save was under way: %v %+v", ok, v)
	}
	if _, ok = sh.save(start.Add(time.Second), time.Hour); !ok {
		t.Fatal("a save that failed is not tried again")
	}
	v.done(v)
	if v, ok = sh.save(start.Add(time.Second), time.Hour); ok {
		t.Fatalf("nothing new, and %+v is stored", v)
	}
	b := &batch{after: v.at.batchUpto(sh), upto: snapshot{low: 1 << 40, high: 1<<40 + 1, xmax: 1 << 41}}
	sh.cursor.reach(position{b, batchEnd})
	if v, ok = sh.save(start.Add(time.Minute), time.Hour); ok {
		t.Fatalf("an idle shard stores %+v after a minute", v)
	}
	if v, ok = sh.save(start.Add(2*time.Hour), time.Hour); !ok || v.at.batch != b {
		t.Fatalf("an idle shard stores nothing after two hours: %v %+v", ok, v)
	}
}

func (p position) batchUpto(sh *shard) snapshot {
	if p.batch == nil {
		return sh.savedAt.batch.upto
	}
	return p.batch.upto
}

// shardGame takes, settles, fails, repeats and reads again, and counts by walking over everything.
type shardGame struct {
	*dice

	t      *testing.T
	shard  *shard
	runs   [][]*flight
	source map[int64]*entry // what the table holds
	got    map[string][]int64
	done   map[int64]bool
	nextID int64
}

func (g *shardGame) fetch() {
	if g.shard.room() == 0 {
		return
	}
	g.nextID++
	key := []string{"", "a", "b", "c", "d"}[g.roll(5)]
	e := &entry{record: record{id: g.nextID, xid: 5, key: key, hasKey: key != "", topic: "t" + fmt.Sprint(g.roll(8)/7), size: 10}, loaded: true}
	if g.roll(5) == 0 {
		e.size, e.loaded = 1+inlineLimit*g.roll(200), false
		e.size = max(e.size, inlineLimit+1)
	}
	row := *e
	row.loaded = true
	g.source[e.id] = &row
	g.shard.cursor.add(e, g.shard.cursor.fetched.batch)
	g.shard.enqueue(e)
}

func (g *shardGame) play() {
	r := g.shard.reader
	switch g.roll(7) {
	case 0, 1:
		r.mu.Lock()
		g.fetch()
		r.mu.Unlock()
	case 2, 3:
		g.take(1 + g.roll(6))
	case 4:
		g.settle()
	case 5:
		g.reload()
	case 6:
		g.wait(time.Duration(g.roll(3)) * time.Second)
	}
	g.check()
}

// drain lets everything that is left succeed.
func (g *shardGame) drain() {
	for steps := 0; g.shard.cursor.unacked > 0 && steps < 1000; steps++ {
		g.wait(2 * time.Second)
		g.reload()
		g.take(10)
		g.settle()
		g.check()
	}
}

// wait lets delays pass, by the bubble's clock.
func (g *shardGame) wait(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (g *shardGame) take(limit int) {
	r := g.shard.reader
	r.mu.Lock()
	run := g.shard.take(limit, r.outMost)
	r.mu.Unlock()
	if len(run) == 0 {
		return
	}
	g.runs = append(g.runs, run)
	for i, f := range run {
		for _, other := range run[:i] {
			if f.hasKey && other.key == f.key && f.prev == nil && !g.done[other.id] {
				g.t.Fatalf("rows %d and %d of one key side by side", other.id, f.id)
			}
		}
		if f.entry.attempt > 1 && len(run) > 1 {
			g.t.Fatalf("row %d goes out a second time, in company", f.id)
		}
	}
}

// settle ends a run: all of it, or all but a row and what followed it.
func (g *shardGame) settle() {
	if len(g.runs) == 0 {
		return
	}
	n := g.roll(len(g.runs))
	run := g.runs[n]
	g.runs = slices.Delete(g.runs, n, n+1)
	bad := g.roll(2*len(run)+1) - 1
	failed := map[*entry]bool{}
	for i, f := range run {
		switch {
		case failed[f.prev]:
			failed[f.entry] = true
			g.shard.reader.returned(f)
		case i == bad:
			failed[f.entry] = true
			g.shard.reader.failed(f, nil, true)
		default:
			if list := g.got[f.key]; f.hasKey && len(list) > 0 && list[len(list)-1] > f.id {
				g.t.Fatalf("row %d is done with after %v", f.id, list)
			}
			g.got[f.key] = append(g.got[f.key], f.id)
			g.done[f.id] = true
			g.shard.reader.settled(f)
		}
	}
}

// reload answers what the reader would read again, or fails to.
func (g *shardGame) reload() {
	r := g.shard.reader
	small, large := r.unread()
	for _, list := range [][]wanted{small, large} {
		if g.roll(4) == 3 {
			r.giveBack(list)
			continue
		}
		for _, w := range list {
			if g.roll(30) == 29 && w.turn {
				delete(g.source, w.entry.id) // somebody deleted the row
				g.done[w.entry.id] = true
			}
			r.mu.Lock()
			r.loaded(w, g.read(w))
			r.mu.Unlock()
		}
	}
}

// read returns the row as the statement would, whose limit is what the row was when it was last read.
func (g *shardGame) read(w wanted) *entry {
	row := g.source[w.entry.id]
	if row == nil {
		return nil
	}
	if g.roll(20) == 19 {
		row.size = []int{1, inlineLimit, inlineLimit + 1, 5 * inlineLimit}[g.roll(4)] // somebody changed the payload
	}
	again := *row
	again.loaded = row.size <= max(w.entry.size, inlineLimit)
	return &again
}

func (g *shardGame) check() {
	r := g.shard.reader
	r.mu.Lock()
	defer r.mu.Unlock()
	held, heavy, out, unacked := 0, 0, 0, 0
	for _, run := range g.runs {
		for _, f := range run {
			out++
			if f.size > inlineLimit {
				heavy += f.size
			}
		}
	}
	for e := g.shard.cursor.head; e != nil; e = e.next {
		unacked++
		if e.loaded {
			held++
			if e.size > inlineLimit {
				heavy += e.size
			}
		}
	}
	sh := g.shard
	if sh.held != held || sh.heavy != heavy || sh.out != out || sh.cursor.unacked != unacked {
		g.t.Fatalf("held %d, heavy %d, out %d, not acked %d; counted %d, %d, %d, %d",
			sh.held, sh.heavy, sh.out, sh.cursor.unacked, held, heavy, out, unacked)
	}
	if out > r.outMost || unacked > r.window {
		g.t.Fatalf("%d out, %d not acked", out, unacked)
	}
}

func TestShardAccountsForEveryRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(20) {
			sh := newTestShard(Ordering(seed%2), 60, 20)
			sh.cursor.reach(position{batch: &batch{after: sawNothing(), upto: snapshot{high: 1 << 40, xmax: 1 << 40}}})
			g := &shardGame{
				dice: randomDice(seed, 3000), t: t, shard: sh,
				source: map[int64]*entry{}, got: map[string][]int64{}, done: map[int64]bool{},
			}
			for g.left() {
				g.play()
			}
			g.drain()
			if sh.cursor.unacked > 0 || sh.held != 0 || sh.heavy != 0 || sh.out != 0 || sh.queue.waiting != 0 || len(sh.queue.lanes) != 0 {
				t.Fatalf("seed %d: at the end %d not acked, %d held, %d heavy, %d out, %d waiting, keys %v",
					seed, sh.cursor.unacked, sh.held, sh.heavy, sh.out, sh.queue.waiting, sh.queue.lanes)
			}
			if int64(len(g.done)) != g.nextID {
				t.Fatalf("seed %d: %d of %d rows are done with", seed, len(g.done), g.nextID)
			}
		}
	})
}

func TestIdleShardsAreNotStoredForTheSakeOfOthersTransactions(t *testing.T) {
	start := time.Now()
	sh := newTestShard(OrderByKey, 100, 10)
	from := snapshot{low: 7, high: 7, xmax: 100}
	sh.cursor = newCursor(between(from))
	sh.savedAt, sh.savedTime = between(from), start
	next := snapshot{low: 7, high: 7, xmax: 200}
	sh.cursor.reach(position{&batch{after: from, upto: next}, batchEnd})
	if v, ok := sh.save(start.Add(2*time.Hour), time.Hour); ok {
		t.Fatalf("no id was drawn, and %+v is stored", v)
	}
	next.low, next.high = 8, 8
	sh.cursor.reach(position{&batch{after: from, upto: next}, batchEnd})
	if _, ok := sh.save(start.Add(4*time.Hour), time.Hour); !ok {
		t.Fatal("an id was drawn, and nothing is stored")
	}
}

// Whoever waits for a message wakes when the shard's context ends, and ends the message's context, maybe before that end reaches it.
func TestMessageContextEndsWithTheCauseOfTheShard(t *testing.T) {
	for range 300 {
		sh := newTestShard(OrderByKey, 10, 10)
		sh.context, sh.cancel = context.WithCancelCause(t.Context()) //nolint:fatcontext // of a shard of its own
		for range 200 {                                              // messages that the end reaches as well, one after the other
			_, cancel := (&flight{shard: sh, entry: &entry{}}).context()
			defer cancel()
		}
		ctx, cancel := (&flight{shard: sh, entry: &entry{}}).context()
		var waiter sync.WaitGroup
		waiter.Go(func() {
			<-sh.context.Done()
			cancel()
		})
		sh.cancel(ErrLeadershipLost)
		waiter.Wait()
		if cause := context.Cause(ctx); !errors.Is(cause, ErrLeadershipLost) {
			t.Fatalf("the message ended with %v", cause)
		}
	}
}
