package pgoutbox

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// touch says that a follower has something to store. It wakes the session only where the next tick is too far away.
func (g *leadership) touch() {
	if !g.dirty.Swap(true) && g.poll > g.save {
		g.wake()
	}
}

func (g *leadership) saveDue() time.Time {
	if !g.dirty.Load() {
		return time.Now().Add(time.Hour)
	}
	return g.lastSave.Add(g.save)
}

func (g *leadership) dueSaves(s *session, claims []*claim, now time.Time) ([]request, [][]save) {
	if now.Sub(g.lastSave) < g.save-g.save/8 { // a poll of the same length must not make every other one miss
		return nil, nil
	}
	g.lastSave = now
	g.dirty.Store(false)
	var saves []save
	for _, c := range claims {
		for _, v := range c.follower.saves(now) {
			if len(v.pending) > saveChunk {
				g.later(v)
				continue
			}
			saves = append(saves, v)
		}
	}
	requests, packs := saveRequests(g.queries.save, s.token, saves)
	for i := range requests {
		requests[i].durable = g.replicas // or the end of the log, which a standby is asked for, would not be sent to it for a while
	}
	return requests, packs
}

// flush saves between two ticks, where polls are further apart than saves.
func (g *leadership) flush(ctx context.Context, s *session, now time.Time) error {
	g.mu.Lock()
	claims := slices.Clone(g.claims)
	g.mu.Unlock()
	writes, packs := g.dueSaves(s, claims, now)
	if len(writes) == 0 {
		return nil
	}
	results, err := s.roundTrip(ctx, writes...)
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	return g.saved(packs, results)
}

// later stores a long pending list outside the tick, step by step.
func (g *leadership) later(v save) {
	g.enqueue(&task{ctx: v.lead.ctx, fail: func(error) {}, run: func(ctx context.Context, s *session) error {
		return g.store(ctx, s, []save{v})
	}})
}

// store writes positions now. It returns an error when leadership must be given up.
func (g *leadership) store(ctx context.Context, s *session, saves []save) error {
	ready := make([]save, 0, len(saves))
	for _, v := range saves {
		staged, err := g.stage(ctx, s, v)
		if err != nil {
			return err
		}
		if staged {
			ready = append(ready, v)
		}
	}
	requests, packs := saveRequests(g.queries.save, s.token, ready)
	for i, r := range requests {
		results, err := s.roundTrip(ctx, r)
		if err != nil {
			return fmt.Errorf("save: %w", err)
		}
		if err := g.saved(packs[i:i+1], results); err != nil {
			return err
		}
	}
	return nil
}

// storeDurably writes one position and waits until it would survive a crash. False without an error: it was not written, and
// that is reported.
func (g *leadership) storeDurably(ctx context.Context, s *session, v save) (bool, error) {
	stored, done := false, v.done
	v.done = func(v save) {
		stored = true
		done(v)
	}
	staged, err := g.stage(ctx, s, v)
	if !staged || err != nil {
		return false, err
	}
	requests, packs := saveRequests(g.queries.save, s.token, []save{v})
	requests[0].durable = true
	results, err := s.roundTrip(ctx, requests...)
	if err != nil {
		return false, fmt.Errorf("save: %w", err)
	}
	err = g.saved(packs, results)
	return stored, err
}

// stage prepares a save with a long pending list, and reports whether the save can follow.
func (g *leadership) stage(ctx context.Context, s *session, v save) (bool, error) {
	for _, r := range v.stages(g.queries.stage, s.token) {
		results, err := s.roundTrip(ctx, r)
		if err != nil {
			return false, fmt.Errorf("save shard %d: %w", v.lead.shard, err)
		}
		if written, err := g.written(results[0]); !written {
			return false, err
		}
		if results[0].CommandTag.RowsAffected() == 0 {
			return false, v.superseded()
		}
	}
	return true, nil
}

// saved looks at the answers of saves: a shard that was not stored is led by somebody else.
func (g *leadership) saved(packs [][]save, results []*pgconn.Result) error {
	for i, pack := range packs {
		written, err := g.written(results[i])
		if err != nil {
			return err
		}
		if !written {
			continue
		}
		stored := map[string]bool{}
		for _, row := range results[i].Rows {
			stored[string(row[0])+"/"+string(row[1])] = true
		}
		for _, v := range pack {
			if !stored[fmt.Sprintf("%d/%d", v.lead.consumer, v.lead.shard)] {
				return v.superseded()
			}
			v.done(v)
		}
	}
	return nil
}

func (v save) superseded() error {
	return fmt.Errorf("save shard %d of consumer %d: a later term began: %w", v.lead.shard, v.lead.consumer, ErrLeadershipLost)
}

// written reports whether a cursor write ran; an error means that leadership is lost.
func (g *leadership) written(result *pgconn.Result) (bool, error) {
	if hasCode(result.Err, codeReadOnly) {
		return false, fmt.Errorf("save: the server has become read-only: %w", result.Err)
	}
	if result.Err != nil {
		g.reportFailed("a position was not saved, it is tried again", result.Err)
		return false, nil //nolint:nilerr // reported; the leadership stands, and the next save takes the same rows
	}
	return true, nil
}
