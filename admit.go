package pgoutbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

// admit begins to serve the shards that were led since the last round.
func (r *reader) admit(ctx context.Context) error {
	r.mu.Lock()
	waiting := r.won
	r.won = nil
	tick := r.tick
	r.placeReplica(waiting)
	r.mu.Unlock()
	for i, w := range waiting {
		if w.lead.ctx.Err() != nil {
			continue
		}
		if r.liveOnly {
			if tick.n <= w.lead.born {
				r.putBack(waiting[i : i+1])
				continue
			}
			w.row.at, w.row.pending = between(tick.snapshot), nil
		}
		pending, err := r.readPending(ctx, w.row)
		if err != nil {
			r.putBack(waiting[i:])
			return fmt.Errorf("read the pending rows of shard %d: %w", w.lead.shard, err)
		}
		r.serve(w, pending)
	}
	return nil
}

func (r *reader) putBack(rest []won) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.won = append(rest, r.won...)
}

// readPending returns the rows that were out, or held back, when the position was stored. An id whose row is gone, or is
// another one by now, has none. One that the walk has yet to come to is left to it: it was written ahead of a position that
// was never stored.
func (r *reader) readPending(ctx context.Context, row stored) ([]*entry, error) {
	var out []*entry
	seen := map[int64]bool{}
	for rest := row.pending; len(rest) > 0; {
		n := min(pageRows, len(rest))
		rows, err := r.fetcher.readByID(ctx, rest[:n], inlineLimit)
		if err != nil {
			return nil, err
		}
		for _, id := range rest[:n] {
			e, ok := rows[id]
			if !ok || seen[id] || !row.at.passed(e.id, e.xid) {
				continue
			}
			seen[id] = true
			if len(out) >= holdMost {
				e.loaded, e.payload = false, nil
			}
			out = append(out, e)
		}
		rest = rest[n:]
	}
	// Rows that were parked stand before what they came behind. In the order of ids, rows of one key are in theirs.
	slices.SortFunc(out, func(a, b *entry) int { return cmp.Compare(a.id, b.id) })
	return out, nil
}

// passed reports whether a row lies at or before the position.
func (p position) passed(id int64, xid uint64) bool {
	return p.batch.upto.visible(id, xid) && (id <= p.last || !p.batch.has(id, xid))
}

func (r *reader) serve(w won, pending []*entry) {
	sh := &shard{
		lead: w.lead, reader: r, cursor: newCursor(w.row.at), queue: newQueue(r.ordering),
		savedAt: w.row.at, savedTime: time.Now(), savedPending: len(w.row.pending),
		parkedKeys: map[string]bool{}, freeing: map[string]bool{},
	}
	sh.context, sh.cancel = context.WithCancelCause(r.values)
	for _, key := range w.row.parkedKeys {
		sh.parkedKeys[key] = true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shards[sh.shard] = sh
	sh.suspectAfter(w.row, pending)
	for _, e := range pending {
		sh.cursor.restore(e)
		sh.enqueue(e)
	}
	r.scans = append(r.scans, &scan{at: w.row.at, shards: []*shard{sh}, ticked: w.lead.born})
	context.AfterFunc(w.lead.ctx, func() { r.lost(sh) })
	r.offer(sh)
}

// lost ends a shard at once: the contexts of its messages end with the cause, and nothing it still does counts.
func (r *reader) lost(sh *shard) {
	r.mu.Lock()
	sh.gone = true
	sh.absolve()
	r.checkDrained()
	r.mu.Unlock()
	sh.cancel(context.Cause(sh.lead.ctx))
	r.poke()
}
