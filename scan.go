package pgoutbox

import (
	"context"
	"slices"
	"time"
)

// scan walks a batch for the shards that stand at the same position. Most of the time there is one for all shards of a
// consumer; a shard that was just taken over, or had no room, walks in its own until it has caught up.
type scan struct {
	at     position // how far rows were fetched
	shards []*shard
	ticked uint64 // the tick that was last looked at
	found  bool   // the batch has rows

	fetched time.Time // when the last page came

	late      []uint64 // transactions with rows at or below the lower mark
	lateKnown bool
	everyLate bool // too many: the walk begins at the first id
	rows      int  // wanted of the next page, 0 before the first
}

// windowIDs bounds the rows that one statement looks at, wanted or not. Skipping a row of another consumer costs the server a
// third of a microsecond.
const windowIDs = 16 * pageRows

// begin starts the batch that ends at upto.
func (sc *scan) begin(upto snapshot) {
	sc.at = position{batch: &batch{after: sc.at.batch.upto, upto: upto}}
	sc.late, sc.lateKnown, sc.everyLate, sc.found = nil, false, false, false
}

// sameAs reports whether the other scan stands at the same place, so that one walk can serve the shards of both.
func (sc *scan) sameAs(other *scan) bool {
	if sc.at.last != other.at.last || !sc.at.batch.upto.equal(other.at.batch.upto) {
		return false
	}
	return sc.at.atEnd() || sc.at.batch.after.equal(other.at.batch.after)
}

func (sc *scan) numbers() []int64 {
	out := make([]int64, len(sc.shards))
	for i, sh := range sc.shards {
		out[i] = int64(sh.shard)
	}
	return out
}

// filter is what the server need not send.
func (sc *scan) filter(c consumer) filter {
	var by filter
	if len(sc.shards) < c.shards {
		by.shards = sc.numbers()
	}
	if c.startAt != nil && sc.at.batch.after.equal(sawNothing()) {
		by.startAt = c.startAt
	}
	return by
}

// page is the outcome of one fetch: rows of the batch in order, and how far the walk got.
type page struct {
	rows []*entry
	to   position
}

// fetch reads the next page: first late rows, then windows of ids. limit bounds the rows.
func (sc *scan) fetch(ctx context.Context, f *fetcher, limit int) (page, error) {
	b, by := sc.at.batch, sc.filter(f.consumer)
	if sc.rows == 0 {
		sc.rows = pageRows
	}
	limit = min(limit, sc.rows)
	if !sc.lateKnown {
		late, all, err := f.readLateXids(ctx, b)
		if err != nil {
			return page{}, err
		}
		sc.late, sc.lateKnown, sc.everyLate = late, true, !all
	}
	if len(sc.late) > 0 && sc.at.last < b.after.low {
		rows, to, err := f.readLate(ctx, b, sc.late, sc.at.last, limit, by)
		sc.adapt(rows)
		return page{rows: b.members(rows), to: position{b, to}}, err
	}
	from := sc.at.last
	if !sc.everyLate {
		from = max(from, b.after.low)
	}
	if from >= b.upto.high {
		return page{to: position{b, batchEnd}}, nil
	}
	to := min(from+windowIDs, b.upto.high)
	rows, err := f.readWindow(ctx, b, from, to, limit, by)
	if err != nil {
		return page{}, err
	}
	switch {
	case len(rows) == limit:
		to = rows[limit-1].id
	case len(rows) == 0 && to < b.upto.high:
		next, err := f.readNextID(ctx, to, b.upto.high)
		if err != nil {
			return page{}, err
		}
		if to = next - 1; next == 0 {
			to = b.upto.high
		}
	}
	sc.adapt(rows)
	if to >= b.upto.high {
		to = batchEnd
	}
	return page{rows: b.members(rows), to: position{b, to}}, nil
}

// adapt keeps pages near pageBytes, however large the rows are.
func (sc *scan) adapt(rows []*entry) {
	bytes := 0
	for _, e := range rows {
		bytes += len(e.payload) + len(e.metadata)
	}
	if bytes > pageBytes {
		sc.rows = max(len(rows)*pageBytes/bytes, 16)
	} else {
		sc.rows = min(sc.rows*2, pageRows)
	}
}

const pageBytes = 4 << 20

// members drops the rows that belong to another batch.
func (b *batch) members(rows []*entry) []*entry {
	return slices.DeleteFunc(rows, func(e *entry) bool { return !b.has(e.id, e.xid) })
}
