package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// tick looks at the server and tells every follower; due saves travel in the same round trip.
func (g *leadership) tick(ctx context.Context, s *session) error {
	g.mu.Lock()
	g.urgent = false
	claims := slices.Clone(g.claims)
	leading := g.leading()
	g.mu.Unlock()

	sent := time.Now()
	g.lastTick = sent
	requests := g.tickRequests(sent)
	ticks := len(requests)
	writes, packs := g.dueSaves(s, claims, sent)
	requests = append(requests, writes...)
	looks := leading && !g.lockOnly && !sent.Before(g.nextLook)
	if looks {
		g.nextLook = sent.Add(lookInterval)
		requests = append(requests, request{sql: g.queries.unparkedShards, frequent: true})
	}
	results, err := s.roundTrip(ctx, requests...)
	if err != nil {
		return fmt.Errorf("tick: %w", err)
	}
	if err := g.prove(results[0], s, sent); err != nil {
		return err
	}
	if err := g.saved(packs, results[ticks:]); err != nil {
		return err
	}
	if looks {
		g.announceUnparked(results[len(results)-1])
	}
	if g.lockOnly {
		return nil
	}
	t, err := g.readTick(results[:ticks])
	if err != nil {
		// Somebody's table lock, or a grant taken away. The session lives, as the first answer proved.
		g.reportFailed("a tick was given up", err)
		return nil
	}
	for _, c := range claims {
		c.follower.ticked(t)
	}
	return nil
}

// announceUnparked tells the followers which of their shards have parked rows that are asked for.
func (g *leadership) announceUnparked(result *pgconn.Result) {
	if result.Err != nil {
		g.reportFailed("the look for rows to unpark was given up", result.Err)
		return
	}
	shards := map[string][]int{}
	for _, row := range result.Rows {
		if shard, err := strconv.Atoi(string(row[1])); err == nil { // a smallint
			shards[string(row[0])] = append(shards[string(row[0])], shard)
		}
	}
	g.mu.Lock()
	claims := slices.Clone(g.claims)
	g.mu.Unlock()
	for _, c := range claims {
		if list := shards[strconv.FormatInt(c.consumer, 10)]; len(list) > 0 {
			c.follower.unparked(list)
		}
	}
}

func (g *leadership) tickRequests(now time.Time) []request {
	if g.lockOnly {
		return []request{{sql: g.queries.alive, frequent: true}}
	}
	requests := []request{
		{sql: g.queries.alive, frequent: true},
		{sql: g.queries.mark, frequent: true},
		{sql: g.queries.snapshot, frequent: true},
		{sql: g.queries.mark, frequent: true},
	}
	if g.replicas { // after the snapshot: what it sees was in the log by then
		requests = append(requests, request{sql: g.queries.position, frequent: true})
	}
	if !now.Before(g.nextProbe) {
		g.nextProbe = now.Add(probeInterval)
		requests = append(requests, request{sql: g.queries.probe})
	}
	return requests
}

// prove takes the first answer of a poll for the proof that the session is ours, and extends the trust in it.
func (g *leadership) prove(result *pgconn.Result, s *session, sent time.Time) error {
	alive, err := firstRow(result)
	if err != nil {
		return fmt.Errorf("proof of life: %w", err)
	}
	if alive[0] != "f" {
		return errors.New("the server is in recovery: it became, or always was, a standby")
	}
	if alive[1] != s.token || alive[2] != s.lease {
		return errors.New("somebody reset the lock session; its locks may be gone")
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	last := g.answered.Load()
	if (last == nil && s.proved) || (last != nil && !g.trustedSince(*last, time.Now())) {
		return errSilent // too late: what was led has been given up, or must be, and the locks go with the session
	}
	s.proved = true
	g.ended = nil
	g.answered.Store(&sent)
	rest := time.Until(sent.Add(g.limits.lease - g.limits.margin()))
	if g.watchdog == nil {
		g.watchdog = time.AfterFunc(rest, g.expire)
	} else {
		g.watchdog.Reset(rest)
	}
	return nil
}

func (g *leadership) readTick(results []*pgconn.Result) (tick, error) {
	var position string
	if g.replicas {
		row, err := firstRow(results[4])
		if err != nil {
			g.reportFailed("the look for the end of the log was given up, so the primary serves", err)
		} else {
			position = row[0]
		}
		results = slices.Delete(slices.Clone(results), 4, 5)
	}
	var values [5]string
	for i, result := range results[1:] {
		row, err := firstRow(result)
		if err != nil && i < 3 {
			return tick{}, err
		}
		if err != nil {
			g.reportFailed("the look for ids above the sequence was given up", err)
			continue
		}
		values[i] = row[0]
	}
	if values[3] != "" {
		highest, err := strconv.ParseInt(values[3], 10, 64)
		if err != nil {
			return tick{}, fmt.Errorf("highest id: %w", err)
		}
		g.stray = max(g.stray, highest)
	}
	t, err := readTick(values[0], values[1], values[2], g.epoch(), g.high, g.stray)
	if err != nil {
		return tick{}, err
	}
	g.high = t.high
	g.n++
	t.n, t.position = g.n, position
	return t, nil
}
