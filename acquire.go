package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// acquire tries for every shard that is wanted, without waiting for any.
func (g *leadership) acquire(ctx context.Context, s *session) error {
	wanted := g.wanted()
	if len(wanted) == 0 || !g.trusted() {
		return nil
	}
	// In the order of a map, which is a different one each time: processes that start together must not all begin with the
	// same shard.
	keys := slices.Collect(maps.Keys(wanted))
	results, err := s.roundTrip(ctx, request{sql: g.queries.lock, args: []any{keys}})
	if err != nil {
		return fmt.Errorf("lock: %w", err)
	}
	if results[0].Err != nil {
		return fmt.Errorf("lock, and nobody knows which were taken: %w", results[0].Err)
	}
	won := map[*claim][]int{}
	var refused []int64
	for _, row := range results[0].Rows {
		key, err := strconv.ParseInt(string(row[0]), 10, 64)
		if err != nil {
			return fmt.Errorf("lock: %w", err)
		}
		w := wanted[key]
		if string(row[1]) != "t" {
			refused = append(refused, key)
			continue
		}
		won[w.claim] = append(won[w.claim], w.shard)
	}
	g.refused(ctx, s, refused, wanted)
	for c, shards := range won {
		if err := g.takeOver(ctx, s, c, shards); err != nil {
			return err
		}
	}
	return nil
}

// want is a shard that is claimed and not held by this session. Session locks stack: asking again for one that is held would
// be granted.
type want struct {
	claim *claim
	shard int
}

func (g *leadership) wanted() map[int64]want {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := map[int64]want{}
	held := map[int64]bool{}
	for _, c := range g.claims {
		for shard, key := range c.keys {
			if c.held[shard] != nil {
				held[key] = true
			} else {
				out[key] = want{c, shard}
			}
		}
	}
	maps.DeleteFunc(out, func(key int64, _ want) bool { return held[key] })
	return out
}

func (g *leadership) wantsMore() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.ContainsFunc(g.claims, func(c *claim) bool { return len(c.held) < len(c.keys) })
}

// takeOver begins a term for shards whose locks were just taken, and hands them to their follower.
func (g *leadership) takeOver(ctx context.Context, s *session, c *claim, shards []int) error {
	numbers := make([]int64, len(shards))
	for i, shard := range shards {
		numbers[i] = int64(shard)
	}
	requests := []request{{sql: g.queries.takeOver, args: []any{c.consumer, numbers, g.owner, s.token}, durable: true}}
	if !g.lockOnly { // after it: what the leader before us parks from now on is refused
		requests = append(requests, request{sql: g.queries.parkedKeys, args: []any{c.consumer, numbers}}, request{sql: g.queries.xmax})
	}
	results, err := s.roundTrip(ctx, requests...)
	if err != nil {
		return fmt.Errorf("begin a term of consumer %d: %w", c.consumer, err)
	}
	for _, result := range results {
		if result.Err != nil {
			g.reportFailed("a term was not begun, it is tried again", result.Err)
			g.wrong(c.what(), fmt.Errorf("a term was not begun: %w", result.Err))
			return g.unlock(ctx, s, c.locks(shards))
		}
	}
	g.wrong(c.what(), nil)
	rows := make([]stored, len(results[0].Rows))
	for i, columns := range results[0].Rows {
		if rows[i], err = parseStored(columns); err != nil {
			return fmt.Errorf("read a cursor of consumer %d: %w", c.consumer, err)
		}
		shards = slices.DeleteFunc(shards, func(shard int) bool { return shard == rows[i].shard })
	}
	if !g.lockOnly {
		if rows, err = g.begun(ctx, s, c, rows, results[1:]); err != nil {
			return err
		}
	}
	for _, row := range rows {
		g.high = max(g.high, row.at.batch.after.high, row.at.batch.upto.high)
	}
	g.nextProbe, g.lastTick = time.Time{}, time.Time{} // the first tick of a term looks for stray ids, and comes at once
	if err := g.handOver(c, rows); err != nil {
		return err
	}
	if len(shards) > 0 {
		g.reportFailed("a shard is not led", fmt.Errorf("shards %v of consumer %d have no cursor; was the consumer removed?", shards, c.consumer))
		return g.unlock(ctx, s, c.locks(shards))
	}
	g.report.info("leading", map[string]any{"consumer": c.consumer, "shards": len(rows)})
	return nil
}

// begun completes the positions of shards whose term began, and gives back those whose position this server cannot read.
func (g *leadership) begun(ctx context.Context, s *session, c *claim, rows []stored, results []*pgconn.Result) ([]stored, error) {
	xmax, err := strconv.ParseUint(string(results[1].Rows[0][0]), 10, 64)
	if err != nil {
		return nil, fmt.Errorf("read where the server is: %w", err)
	}
	var refused []int
	rows = slices.DeleteFunc(rows, func(row stored) bool {
		err := g.date(row.at, xmax)
		if err != nil {
			refused = append(refused, row.shard)
			err = fmt.Errorf("shard %d of consumer %d is not led: %w", row.shard, c.consumer, err)
			g.reportFailed("a shard is not led", err)
			g.wrong(c.what(), err)
		}
		return err != nil
	})
	for _, columns := range results[0].Rows {
		for i := range rows {
			if strconv.Itoa(rows[i].shard) == string(columns[0]) {
				rows[i].parkedKeys = append(rows[i].parkedKeys, string(columns[1]))
			}
		}
	}
	if len(refused) > 0 {
		return rows, g.unlock(ctx, s, c.locks(refused))
	}
	return rows, nil
}

func (g *leadership) handOver(c *claim, rows []stored) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.answered.Load() == nil {
		return errSilent
	}
	if !g.claimed(c) {
		return errors.New("a claim was withdrawn while its locks were taken")
	}
	for _, row := range rows {
		l := newLead(g, c, row)
		c.held[row.shard] = l
		c.follower.led(l, row)
	}
	return nil
}

func (c *claim) what() string { return "the shards of consumer " + strconv.FormatInt(c.consumer, 10) }

func (c *claim) locks(shards []int) []int64 {
	keys := make([]int64, len(shards))
	for i, shard := range shards {
		keys[i] = c.keys[shard]
	}
	return keys
}

// refused counts tries for locks that other sessions hold. A peer is normal; a stranger is reported by name.
func (g *leadership) refused(ctx context.Context, s *session, keys []int64, wanted map[int64]want) {
	if len(keys) == 0 {
		g.refusals = 0
		g.wrong(strangerHolds, nil)
		return
	}
	g.refusals++
	if g.refusals < strangerAfter || (!g.strange && time.Since(g.lastReport["holders"]) < reportEvery) {
		return
	}
	holder, err := s.ask(ctx, g.queries.holder, keys, applicationPrefix)
	if err != nil {
		return
	}
	if g.strange = holder != nil; !g.strange {
		g.lastReport["holders"] = time.Now()
		g.wrong(strangerHolds, nil)
		return
	}
	key, _ := strconv.ParseInt(holder[0], 10, 64) // one of ours
	g.wrong(strangerHolds, fmt.Errorf("the lock of shard %d of consumer %d is held by process %s (application_name %q)",
		wanted[key].shard, wanted[key].claim.consumer, holder[1], holder[2]))
	if time.Since(g.lastReport["holders"]) < reportEvery {
		return
	}
	g.lastReport["holders"] = time.Now()
	g.report.failed("a session that is not of this library holds a shard's lock", errors.New("lock held by a stranger"), map[string]any{
		"consumer": wanted[key].claim.consumer, "shard": wanted[key].shard, "lock": key, "pid": holder[1], "application_name": holder[2],
	})
}

// strangerHolds is what Healthy calls a lock that is not a peer's.
const strangerHolds = "a session that is not of this library"

// applicationPrefix starts the application_name of every lock session, so that peers know each other.
const applicationPrefix = "pgoutbox "
