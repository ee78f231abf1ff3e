package pgoutbox

import (
	"context"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// readerGame plays a whole reader, without workers and without a server: pages come from a history, shards are led, lost and
// led again with what was stored of them, sessions come and go.
type readerGame struct {
	*history

	t      *testing.T
	ticker *ticker
	lives  *leadership
	reader *reader
	shards []*ledShard
	runs   [][]*flight

	terms, scans, repeats int
}

// ledShard is what the database and the twin know about a shard.
type ledShard struct {
	number  int
	columns [][]byte       // stored
	sure    map[int64]bool // acked when it was stored
	lead    *lead          // nil: nobody leads it
	acked   map[int64]bool // as this term knows
	sent    map[int64]bool // by this term
	ever    map[int64]bool // by any
}

const gameShards = 3

// place is the shard of a row: rows without a key are spread.
func (row *historyRow) place() int {
	if row.key == "" {
		return int(row.id) % gameShards
	}
	return int(row.key[0]-'a') % gameShards
}

func newReaderGame(t *testing.T, d *dice) *readerGame {
	h := newHistory(d, d.roll(2) == 0)
	g := &readerGame{history: h, t: t, ticker: &ticker{history: h}, lives: &leadership{}}
	g.lives.limits.lease = 1000 * time.Hour
	now := time.Now()
	g.lives.answered.Store(&now)
	cfg := readerConfig{
		ordering: Ordering(d.roll(2)), window: 3 + d.roll(20), outMost: 1 + d.roll(6), staffMost: func(int) int { return 0 },
		runMost: func(int, int) int { return 1 + d.roll(4) }, nackDelay: time.Millisecond, nackMost: time.Second, values: context.Background(),
	}
	g.reader = newReader(cfg, g.lives, &fetcher{consumer: consumer{id: 1, shards: gameShards}})
	for number := range gameShards {
		g.shards = append(g.shards, &ledShard{
			number: number, columns: storedColumns(number, 0, between(sawNothing()), nil),
			sure: map[int64]bool{}, ever: map[int64]bool{},
		})
	}
	return g
}

func (g *readerGame) play() {
	switch g.roll(16) {
	case 0, 1, 2, 3:
		g.event()
	case 4, 5, 6:
		if tick, ok := g.ticker.advance(); ok {
			g.reader.ticked(tick)
		}
	case 7, 8:
		g.round()
	case 9, 10:
		g.take()
	case 11, 12:
		g.settle()
	case 13:
		g.save()
	case 14:
		g.acquire(g.shards[g.roll(gameShards)])
		<-time.After(time.Duration(g.roll(3)) * time.Second) // delays pass, by the bubble's clock
	case 15:
		switch g.roll(8) {
		case 0, 1:
			g.lose(g.shards[g.roll(gameShards)])
		case 2: // the session ended, and with it everything in memory
			for _, s := range g.shards {
				g.lose(s)
			}
			g.ticker.high, g.ticker.stray, g.ticker.step = 0, 0, 0
		}
	}
	synctest.Wait()
}

// acquire leads a shard, as the session does: the mark of what is stored counts from then on, and ticks from then on only.
func (g *readerGame) acquire(s *ledShard) {
	if s.lead != nil {
		return
	}
	row, err := parseStored(s.columns)
	if err != nil {
		g.t.Fatal(err)
	}
	g.terms++
	s.lead = &lead{consumer: 1, shard: s.number, term: int64(g.terms), born: g.ticker.n, of: g.lives}
	s.lead.ctx, s.lead.end = context.WithCancelCause(context.Background())
	s.acked, s.sent = maps.Clone(s.sure), map[int64]bool{}
	g.ticker.high = max(g.ticker.high, row.at.batch.after.high, row.at.batch.upto.high)
	g.ticker.step = 0
	row.term = s.lead.term
	g.reader.led(s.lead, row)
}

func (g *readerGame) lose(s *ledShard) {
	if s.lead == nil {
		return
	}
	s.lead.end(ErrLeadershipLost)
	s.lead = nil
	synctest.Wait()
}

// round is reader.round, with pages out of the history.
func (g *readerGame) round() {
	r := g.reader
	r.forget()
	r.mu.Lock()
	waiting := r.won
	r.won = nil
	r.mu.Unlock()
	for _, w := range waiting {
		if w.lead.ctx.Err() == nil {
			r.serve(w, g.pending(w.row))
		}
	}
	small, large := r.unread()
	for _, w := range append(small, large...) {
		again := *w.entry
		again.loaded = true
		r.mu.Lock()
		r.loaded(w, &again)
		r.mu.Unlock()
	}
	r.advance()
	g.scans = max(g.scans, len(r.scans))
	for _, sc := range slices.Clone(r.scans) {
		if limit := r.wants(sc); limit > 0 {
			r.deliver(sc, g.page(sc, min(limit, 1+g.roll(8))))
		}
	}
	g.check()
}

func (g *readerGame) pending(row stored) []*entry {
	var out []*entry
	for _, id := range row.pending {
		if found := g.byID[id]; row.at.passed(found.id, found.xid) {
			out = append(out, found.entry())
		}
	}
	return out
}

func (row *historyRow) entry() *entry {
	return &entry{record: record{id: row.id, xid: row.xid, slot: row.place(), key: row.key, hasKey: row.key != ""}, loaded: true}
}

func (g *readerGame) page(sc *scan, limit int) page {
	b := sc.at.batch
	rows := g.committed(func(row *historyRow) bool {
		return row.id > sc.at.last && b.has(row.id, row.xid) && slices.Contains(sc.numbers(), int64(row.place()))
	})
	to := position{b, batchEnd}
	if len(rows) > limit {
		rows = rows[:limit]
		to.last = rows[limit-1].id
	}
	var entries []*entry
	for _, row := range rows {
		entries = append(entries, row.entry())
	}
	return page{rows: entries, to: to}
}

func (g *readerGame) take() {
	g.reader.mu.Lock()
	run := g.reader.takeFrom()
	g.reader.mu.Unlock()
	if len(run) == 0 {
		return
	}
	g.runs = append(g.runs, run)
	s := g.shards[run[0].shard.shard]
	for i, f := range run {
		row := g.byID[f.id]
		if f.shard.lead != s.lead || row.place() != s.number {
			g.t.Fatalf("row %d goes out in shard %d, term %d", f.id, f.shard.shard, f.shard.term)
		}
		if s.acked[f.id] || (f.entry.attempt == 1) == s.sent[f.id] {
			g.t.Fatalf("row %d of shard %d goes out again in term %d, attempt %d, acked %v", f.id, s.number, f.shard.term, f.entry.attempt, s.acked[f.id])
		}
		for _, before := range g.predecessors(row) {
			sameRun := slices.ContainsFunc(run[:i], func(f *flight) bool { return f.id == before.id })
			if !s.acked[before.id] && !sameRun {
				g.t.Fatalf("row %d goes out before row %d of its key", row.id, before.id)
			}
		}
		if s.ever[f.id] && f.entry.attempt == 1 {
			g.repeats++
		}
		s.sent[f.id], s.ever[f.id] = true, true
	}
}

// settle ends a run, some time; the shard may be lost by then.
func (g *readerGame) settle() {
	if len(g.runs) == 0 {
		return
	}
	n := g.roll(len(g.runs))
	run := g.runs[n]
	g.runs = slices.Delete(g.runs, n, n+1)
	bad := g.roll(3*len(run)+1) - 1
	failed := map[*entry]bool{}
	for i, f := range run {
		s := g.shards[f.shard.shard]
		switch {
		case failed[f.prev]:
			failed[f.entry] = true
			g.reader.returned(f)
		case i == bad:
			failed[f.entry] = true
			g.reader.failed(f, nil, true)
		default:
			if f.shard.lead == s.lead {
				s.acked[f.id] = true
			}
			g.reader.settled(f)
		}
	}
}

// save stores what the shards want stored; some of it gets lost on the way.
func (g *readerGame) save() {
	for _, v := range g.reader.collectSaves(time.Now(), 0) {
		if g.roll(5) == 4 {
			continue
		}
		s := g.shards[v.lead.shard]
		s.columns, s.sure = storedColumns(s.number, v.lead.term, v.at, v.pending), maps.Clone(s.acked)
		v.done(v)
	}
}

func (g *readerGame) check() {
	r := g.reader
	r.mu.Lock()
	defer r.mu.Unlock()
	served := 0
	for _, sc := range r.scans {
		for _, sh := range sc.shards {
			served++
			if r.shards[sh.shard] != sh {
				g.t.Fatalf("a scan serves shard %d, which is not led so any more", sh.shard)
			}
			if !sh.cursor.fetched.same(sc.at) {
				g.t.Fatalf("shard %d stands at %+v, its scan at %+v", sh.shard, sh.cursor.fetched, sc.at)
			}
			if sh.cursor.unacked > r.window && sh.cursor.frontSeq != uint64(sh.cursor.unacked) {
				g.t.Fatalf("shard %d holds %d rows, its window is %d", sh.shard, sh.cursor.unacked, r.window)
			}
			if sh.out > r.outMost {
				g.t.Fatalf("%d rows of shard %d are out", sh.out, sh.shard)
			}
		}
	}
	if served != len(r.shards) {
		g.t.Fatalf("%d scans serve %d shards of %d", len(r.scans), served, len(r.shards))
	}
}

func (p position) same(other position) bool {
	return p.last == other.last && p.batch.upto.equal(other.batch.upto) && (p.atEnd() || p.batch.after.equal(other.batch.after))
}

// finish lets everything end well, and looks for rows that never came.
func (g *readerGame) finish() {
	g.settleAll()
	g.history.settle()
	for _, s := range g.shards {
		g.acquire(s)
	}
	for range 2 {
		tx := &transaction{} // scans meet when something happened
		g.assign(tx)
		g.end(tx, true)
		g.reader.ticked(g.ticker.whole())
		for range 20 * (len(g.rows) + 10) {
			g.round()
			g.take()
			g.settle()
			<-time.After(2 * time.Second)
			synctest.Wait()
			if len(g.reader.scans) == 1 && g.reader.scans[0].at.atEnd() && g.reader.scans[0].ticked == g.ticker.n && g.idle() {
				break
			}
		}
	}
	if !g.idle() || len(g.reader.scans) != 1 {
		g.t.Fatalf("%d scans at the end", len(g.reader.scans))
	}
	for _, row := range g.rows {
		if row.committed && !g.shards[row.place()].acked[row.id] {
			g.t.Fatalf("row %+v of shard %d never came", row, row.place())
		}
	}
}

func (g *readerGame) settleAll() {
	for len(g.runs) > 0 {
		g.settle()
	}
}

func (g *readerGame) idle() bool {
	for _, sh := range g.reader.shards {
		if sh.cursor.unacked > 0 {
			return false
		}
	}
	return len(g.runs) == 0
}

func TestReaderDeliversEveryRowInOrderWhateverIsLost(t *testing.T) {
	var rows, terms, scans, repeats int
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			g := newReaderGame(t, randomDice(seed, 1500))
			for g.left() {
				g.play()
			}
			g.finish()
			for _, s := range g.shards {
				g.lose(s)
			}
			rows, terms, scans, repeats = rows+len(g.rows), terms+g.terms, max(scans, g.scans), repeats+g.repeats
		})
	}
	t.Logf("%d rows, %d terms, up to %d scans, %d repeats", rows, terms, scans, repeats)
	if terms < 500 || scans < 3 || repeats == 0 {
		t.Error("the game does not get to where it matters")
	}
}
