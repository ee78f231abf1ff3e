package pgoutbox

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// unparked makes the reader a follower: of these shards, parked rows are to be delivered again.
func (r *reader) unparked(shards []int) {
	r.mu.Lock()
	for _, number := range shards {
		if sh := r.shards[number]; sh != nil {
			sh.unpark = true
		}
	}
	r.mu.Unlock()
	r.poke()
}

// bringBack has parked rows put back before everything else of their shards, as many at a time as fit into one statement.
func (r *reader) bringBack() {
	r.mu.Lock()
	var due []*shard
	for _, sh := range r.shards {
		switch wait := time.Until(sh.moveAgain); {
		case sh.gone || !sh.unpark || sh.moving:
		case wait > 0:
			r.again = min(r.again, wait)
		default:
			sh.unpark, sh.moving = false, true
			due = append(due, sh)
		}
	}
	r.mu.Unlock()
	for _, sh := range due {
		r.leadership.move(sh.lead, &unparking{shard: sh})
	}
}

// unparking is one statement on its way from the table to the shard.
type unparking struct {
	shard *shard
	ids   []int64  // of what leaves the table
	rows  []*entry // what is still there of them
	more  bool
}

// look reads what is asked for.
func (u *unparking) look(ctx context.Context, s *session) (bool, error) {
	l, q := u.shard.lead, u.shard.lead.of.queries
	results, err := s.roundTrip(ctx,
		request{sql: q.unparkKeys, args: []any{l.consumer, l.shard}},
		request{sql: q.unparkedRows, args: []any{l.consumer, l.shard, parkMost + 1}})
	if err != nil {
		return false, fmt.Errorf("look for rows to unpark: %w", err)
	}
	for _, result := range results {
		if result.Err != nil {
			l.of.reportFailed("rows were not unparked, it is tried again", result.Err)
			return false, nil //nolint:nilerr // reported; the session stands
		}
	}
	for _, columns := range results[1].Rows {
		if len(u.ids) == parkMost {
			u.more = true
			break
		}
		id, e, err := parseUnparked(columns)
		if err != nil {
			return false, fmt.Errorf("parked row: %w", err)
		}
		u.ids = append(u.ids, id)
		if e != nil {
			u.rows = append(u.rows, e)
		}
	}
	return true, nil
}

// parseUnparked returns no entry when the row is gone.
func parseUnparked(columns [][]byte) (int64, *entry, error) {
	id, err := strconv.ParseInt(string(columns[0]), 10, 64)
	if err != nil || columns[1] == nil {
		return id, nil, err
	}
	e := &entry{trouble: &trouble{unparked: true}}
	e.id, e.partial = id, true
	if e.xid, err = strconv.ParseUint(string(columns[1]), 10, 64); err != nil {
		return id, nil, fmt.Errorf("transaction of row %d: %w", id, err)
	}
	if e.size, err = strconv.Atoi(string(columns[4])); err != nil {
		return id, nil, fmt.Errorf("size of row %d: %w", id, err)
	}
	e.topic, e.key, e.hasKey = string(columns[2]), string(columns[3]), columns[3] != nil
	return id, e, nil
}

// prepare is the position with the rows pending again.
func (u *unparking) prepare() (move, bool) {
	sh := u.shard
	sh.reader.mu.Lock()
	defer sh.reader.mu.Unlock()
	at, pending := sh.cursor.state()
	back := make([]int64, 0, len(u.rows)+len(pending))
	for _, e := range u.rows {
		back = append(back, e.id)
	}
	return move{
		save: sh.saveOf(at, append(back, pending...)), sql: sh.reader.leadership.queries.unpark, args: []any{u.ids},
	}, len(u.ids) > 0
}

// finish queues the rows. A key is free again when all of its rows are back; what was about to be parked behind them follows them.
func (u *unparking) finish(stored bool) {
	sh := u.shard
	r := sh.reader
	r.mu.Lock()
	sh.moving = false
	if !stored {
		sh.unpark, sh.moveAgain = true, time.Now().Add(jitter(moveRetry))
		r.mu.Unlock()
		r.poke()
		return
	}
	sh.cursor.prepend(u.rows)
	for _, e := range u.rows {
		sh.bringBack(e)
	}
	sh.unpark = sh.unpark || u.more
	if !u.more {
		sh.free()
	}
	r.next(sh)
	r.mu.Unlock()
	r.poke()
	r.report.info("parked rows are delivered again", map[string]any{"shard": sh.shard, "rows": len(u.rows), "gone": len(u.ids) - len(u.rows)})
}

// bringBack queues a row that was parked, or sets it aside again when a row of its key was given up meanwhile.
func (sh *shard) bringBack(e *entry) {
	if e.hasKey && sh.parkedKeys[e.key] {
		free, known := sh.freeing[e.key]
		if known && !free {
			*e.trouble = trouble{wholeKey: true}
			sh.aside = append(sh.aside, e)
			return
		}
		sh.freeing[e.key] = true
	}
	sh.queue.insert(e)
}

// free ends the parking of keys whose rows are all back.
func (sh *shard) free() {
	aside := sh.aside[:0]
	for _, e := range sh.aside {
		if !e.hasKey || !sh.freeing[e.key] {
			aside = append(aside, e)
			continue
		}
		*e.trouble = trouble{unparked: true}
		sh.queue.insert(e)
	}
	clear(sh.aside[len(aside):])
	sh.aside = aside
	for key, free := range sh.freeing {
		if free {
			delete(sh.parkedKeys, key)
		}
	}
	clear(sh.freeing)
}
