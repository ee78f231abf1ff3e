package pgoutbox

import "context"

const (
	reloadMost = 256      // rows read again at a time
	heavyMost  = 16 << 20 // bytes of large payloads that may be out at a time, or one payload
)

// reload reads payloads again whose turn has come: of rows that are repeated, that were queued without one because many
// were, or that are large. It reports whether there may be more to do.
func (r *reader) reload(ctx context.Context) (bool, error) {
	small, large := r.unread()
	if err := r.load(ctx, small, inlineLimit); err != nil {
		return false, err
	}
	for i, want := range large {
		if err := r.load(ctx, large[i:i+1], want.entry.size); err != nil {
			r.giveBack(large[i+1:])
			return false, err
		}
	}
	return len(small) > 0 || len(large) > 0, nil
}

// wanted is a row whose payload is read again. turn: it was taken off the queue's list, otherwise it waits behind one that was.
type wanted struct {
	shard *shard
	entry *entry
	turn  bool
}

// unread picks what to read: rows whose turn has come and the next ones of their keys, and of large ones as many as fit.
func (r *reader) unread() (small, large []wanted) {
	r.mu.Lock()
	defer r.mu.Unlock()
	heavy := 0
	for _, sh := range r.shards {
		heavy += sh.heavy
	}
	for _, sh := range r.shards {
		if sh.gone || r.stopped {
			continue
		}
		for n := sh.queue.unread.len(); n > 0 && len(small) < reloadMost; n-- {
			e := sh.queue.popUnread()
			if e.size > inlineLimit {
				if heavy > 0 && heavy+e.size > heavyMost {
					sh.queue.release(e)
					continue
				}
				heavy += e.size
				sh.heavy += e.size
				large = append(large, wanted{sh, e, true})
				continue
			}
			small = append(small, wanted{sh, e, true})
			for next := e.behind; next != nil && len(small) < reloadMost; next = next.behind {
				if !next.loaded && next.size <= inlineLimit {
					small = append(small, wanted{sh, next, false})
				}
			}
		}
	}
	return small, large
}

func (r *reader) giveBack(list []wanted) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range list {
		if w.entry.size > inlineLimit {
			w.shard.heavy -= w.entry.size
		}
		if w.turn {
			w.shard.queue.release(w.entry)
			r.offer(w.shard)
		}
	}
}

func (r *reader) load(ctx context.Context, list []wanted, limit int) error {
	if len(list) == 0 {
		return nil
	}
	ids := make([]int64, len(list))
	for i, w := range list {
		ids[i] = w.entry.id
	}
	rows, err := r.fetcher.readByID(ctx, ids, limit)
	if err != nil {
		r.giveBack(list)
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range list {
		r.loaded(w, rows[w.entry.id])
	}
	return nil
}

// loaded gives the row its payload back. A row that was deleted, or replaced by another with its id, is done with: there is
// nothing left to deliver.
func (r *reader) loaded(w wanted, again *entry) {
	e := w.entry
	if w.shard.gone {
		return
	}
	if again == nil || again.xid != e.xid || (!e.partial && !again.created.Equal(e.created)) {
		if e.size > inlineLimit {
			w.shard.heavy -= e.size
		}
		if w.turn {
			w.shard.cleared(e)
			w.shard.cursor.ack(e)
			w.shard.queue.done(e)
			r.next(w.shard)
		}
		return
	}
	if e.partial { // unparked: only what its place depends on was read so far
		e.partial, e.topic, e.uuid, e.metadata, e.slot, e.created = false, again.topic, again.uuid, again.metadata, again.slot, again.created
	}
	if !e.loaded && again.loaded { // its turn came, and with it a second read, when the row before it was found deleted
		e.loaded, e.payload = true, again.payload
		w.shard.hold(e)
	}
	if e.size > inlineLimit {
		w.shard.heavy -= e.size
	}
	e.size = again.size // somebody may have changed the payload
	if e.loaded && e.size > inlineLimit {
		w.shard.heavy += e.size
	}
	if w.turn {
		w.shard.queue.release(e)
		r.offer(w.shard)
	}
}
