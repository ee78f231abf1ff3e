package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// leadership decides which shards this process leads, and until when. It owns the lock session: one goroutine takes and
// frees the locks on it, reads the ticks and writes the cursors, and between those waits on the socket, so it sees at
// once when the server ends the session. Every poll is a proof of life, so there is no second heartbeat.
//
// A lead is trusted until the lease, less a margin, has passed since the last answered poll was sent. The server ends the
// session, and frees its locks, no earlier than a lease after that same poll. So the clock that matters to safety is the
// server's; ours only makes us stop sooner.
type leadership struct {
	leadershipConfig

	queries leaderQueries

	mu        sync.Mutex
	claims    []*claim
	tasks     []*task
	interrupt context.CancelFunc // ends the wait on the socket
	woken     bool               // something to do came while nobody was waiting
	urgent    bool               // a tick is wanted now
	watchdog  *time.Timer

	dirty    atomic.Bool               // a follower has something to store
	answered atomic.Pointer[time.Time] // when the last answered poll was sent; nil: nothing is led

	// The session goroutine's own.
	n          uint64 // ticks
	high       int64  // the highest id that counts as visible
	stray      int64  // the highest committed id that was probed
	lastTick   time.Time
	nextProbe  time.Time
	nextTry    time.Time
	lastSave   time.Time
	refusals   int // tries in a row that other sessions held a lock
	lastReport map[string]time.Time
}

type leadershipConfig struct {
	names    names
	dial     func(context.Context) (*pgx.Conn, error)
	limits   limits
	poll     time.Duration // between ticks when there was nothing new
	retry    time.Duration // between tries for shards that others lead
	save     time.Duration // between saves
	owner    string        // who we are, for people
	lockBase int64
	pooled   bool // a pooler in session mode is fine
	lockOnly bool // nobody reads rows: no ticks, only proofs of life
	report   reporter
}

// reporter is how the leadership tells what happens to it.
type reporter interface {
	info(message string, fields map[string]any)
	failed(message string, err error, fields map[string]any)
}

// follower is told what it leads. It is called on the session goroutine and must not block.
type follower interface {
	led(*lead, stored)
	ticked(tick)
	saves(now time.Time) []save // what has changed enough to be stored
}

// claim is what one follower wants to lead. held is guarded by leadership.mu.
type claim struct {
	consumer int64
	keys     map[int]int64 // the lock of each shard
	follower follower
	held     map[int]*lead
}

type leaderQueries struct {
	alive, mark, snapshot, probe, lock, unlock, holder, takeOver, save, stage string
	check, epoch, identity, consumer, createConsumer                          string
}

const (
	busyGap       = 2 * time.Millisecond // between ticks while there is work
	probeInterval = 10 * time.Second     // between looks for ids above the sequence
	strangerAfter = 3                    // refusals before we ask who holds a lock
	reportEvery   = 10 * time.Second     // the same trouble is told once in so long
)

var (
	errSilent   = errors.New("the server did not answer within the lease")
	errReleased = errors.New("released")
)

func newLeadership(cfg leadershipConfig) *leadership {
	n := cfg.names
	return &leadership{
		leadershipConfig: cfg,
		queries: leaderQueries{
			alive: n.query("tick_alive"), mark: n.query("tick_mark"), snapshot: n.query("tick_snapshot"),
			probe: n.query("tick_stray"), lock: n.query("lock"), unlock: n.query("unlock"), holder: n.query("lock_holder"),
			takeOver: n.query("take_over"), save: n.query("save"), stage: n.query("stage"),
			check: n.query("check"), epoch: n.query("epoch"), identity: n.query("system_identifier"),
			consumer: n.query("consumer"), createConsumer: n.query("create_consumer"),
		},
		lastReport: map[string]time.Time{},
	}
}

// run keeps a session until ctx ends. It survives every error of the database.
func (g *leadership) run(ctx context.Context) {
	pause := g.retry
	for {
		opened := time.Now()
		err := g.hold(ctx)
		g.lose()
		if ctx.Err() != nil {
			g.failTasks(ErrClosed, false)
			return
		}
		g.failTasks(err, true)
		g.reportFailed("the lock session ended, a new one is opened", err)
		if time.Since(opened) > g.limits.lease {
			pause = g.retry
		}
		g.pause(ctx, jitter(pause))
		pause = min(2*pause, max(g.retry, 2*time.Second))
	}
}

func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}

func (g *leadership) pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// hold opens a session and works on it until it is lost.
func (g *leadership) hold(ctx context.Context) error {
	opening, cancel := context.WithTimeout(ctx, max(5*time.Second, g.limits.statement()))
	defer cancel()
	s, err := openSession(opening, g.dial, g.limits, g.pooled)
	if err != nil {
		return err
	}
	defer s.close()
	if err := g.inspect(opening, s); err != nil {
		return err
	}
	// Nothing outlives the session that ticked it: after a crash of the server, transaction ids are handed out again.
	g.high, g.stray, g.lastTick, g.nextProbe, g.nextTry = 0, 0, time.Time{}, time.Time{}, time.Time{}
	for ctx.Err() == nil {
		if err := g.step(ctx, s); err != nil {
			return err
		}
		if err := g.wait(ctx, s); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// step does what is due: tick and saves in one round trip, then tasks, then a try for more shards.
func (g *leadership) step(ctx context.Context, s *session) error {
	now := time.Now()
	if !now.Before(g.tickDue()) {
		if err := g.tick(ctx, s); err != nil {
			return err
		}
	} else if !now.Before(g.saveDue()) {
		if err := g.flush(ctx, s, now); err != nil {
			return err
		}
	}
	if err := g.runTasks(ctx, s); err != nil {
		return err
	}
	if now := time.Now(); !now.Before(g.nextTry) {
		g.nextTry = now.Add(jitter(g.retry))
		return g.acquire(ctx, s)
	}
	return nil
}

func (g *leadership) tickDue() time.Time {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.urgent {
		return g.lastTick.Add(busyGap)
	}
	leading := false
	for _, c := range g.claims {
		leading = leading || len(c.held) > 0
	}
	if !leading {
		return g.lastTick.Add(g.limits.keepAlive()) // whoever stands by only tries the locks
	}
	return g.lastTick.Add(min(g.poll, g.limits.keepAlive()))
}

// wait sleeps on the socket until something is due or wake is called.
func (g *leadership) wait(ctx context.Context, s *session) error {
	due := g.tickDue()
	if save := g.saveDue(); save.Before(due) {
		due = save
	}
	if g.wantsMore() && g.nextTry.Before(due) {
		due = g.nextTry
	}
	ctx, cancel := context.WithDeadline(ctx, due)
	defer cancel()
	g.mu.Lock()
	if g.woken {
		g.woken = false
		g.mu.Unlock()
		return nil
	}
	g.interrupt = cancel
	g.mu.Unlock()
	err := s.conn.PgConn().WaitForNotification(ctx)
	g.mu.Lock()
	g.interrupt, g.woken = nil, false
	g.mu.Unlock()
	if err != nil && ctx.Err() == nil {
		return fmt.Errorf("wait on the lock session: %w", err)
	}
	return nil
}

// wake ends the wait: there is something to do.
func (g *leadership) wake() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.wakeLocked()
}

func (g *leadership) wakeLocked() {
	g.woken = true
	if g.interrupt != nil {
		g.interrupt()
	}
}

// hurry asks for a tick now instead of after the poll interval.
func (g *leadership) hurry() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.urgent {
		g.urgent = true
		g.wakeLocked()
	}
}

// tick looks at the server and tells every follower; due saves travel in the same round trip.
func (g *leadership) tick(ctx context.Context, s *session) error {
	g.mu.Lock()
	g.urgent = false
	claims := slices.Clone(g.claims)
	g.mu.Unlock()

	sent := time.Now()
	g.lastTick = sent
	requests := g.tickRequests(sent)
	ticks := len(requests)
	writes, packs := g.dueSaves(s, claims, sent)
	requests = append(requests, writes...)
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
	g.answered.Store(&sent)
	rest := time.Until(sent.Add(g.limits.lease - g.limits.margin()))
	if g.watchdog == nil {
		g.watchdog = time.AfterFunc(rest, g.lose)
	} else {
		g.watchdog.Reset(rest)
	}
	return nil
}

func (g *leadership) trusted() bool {
	sent := g.answered.Load()
	return sent != nil && g.trustedSince(*sent, time.Now())
}

func (g *leadership) trustedSince(sent, now time.Time) bool {
	return trusts(sent, now, g.limits.lease, g.limits.margin())
}

// lose ends every lead: the session is gone, or its last proof is too old.
func (g *leadership) lose() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.answered.Store(nil)
	if g.watchdog != nil {
		g.watchdog.Stop()
	}
	for _, c := range g.claims {
		for shard, l := range c.held {
			delete(c.held, shard)
			l.end(ErrLeadershipLost)
		}
	}
}

func (g *leadership) readTick(results []*pgconn.Result) (tick, error) {
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
	t, err := readTick(values[0], values[1], values[2], g.high, g.stray)
	if err != nil {
		return tick{}, err
	}
	g.high = t.high
	g.n++
	t.n = g.n
	return t, nil
}

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
	return saveRequests(g.queries.save, s.token, saves)
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
		return false, nil
	}
	return true, nil
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

// takeOver begins a term for shards whose locks were just taken, and hands them to their follower.
func (g *leadership) takeOver(ctx context.Context, s *session, c *claim, shards []int) error {
	numbers := make([]int64, len(shards))
	for i, shard := range shards {
		numbers[i] = int64(shard)
	}
	results, err := s.roundTrip(ctx, request{
		sql: g.queries.takeOver, args: []any{c.consumer, numbers, g.owner, s.token}, durable: true,
	})
	if err != nil {
		return fmt.Errorf("begin a term of consumer %d: %w", c.consumer, err)
	}
	if err := results[0].Err; err != nil {
		g.reportFailed("a term was not begun, it is tried again", err)
		return g.unlock(ctx, s, c.locks(shards))
	}
	rows := make([]stored, len(results[0].Rows))
	for i, columns := range results[0].Rows {
		if rows[i], err = parseStored(columns); err != nil {
			return fmt.Errorf("read a cursor of consumer %d: %w", c.consumer, err)
		}
		shards = slices.DeleteFunc(shards, func(shard int) bool { return shard == rows[i].shard })
		g.high = max(g.high, rows[i].at.batch.after.high, rows[i].at.batch.upto.high)
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

func (c *claim) locks(shards []int) []int64 {
	keys := make([]int64, len(shards))
	for i, shard := range shards {
		keys[i] = c.keys[shard]
	}
	return keys
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
		l := &lead{
			consumer: c.consumer, shard: row.shard, term: row.term, born: g.n, of: g,
			key: c.keys[row.shard],
		}
		l.ctx, l.end = context.WithCancelCause(context.Background())
		c.held[row.shard] = l
		c.follower.led(l, row)
	}
	return nil
}

// refused counts tries for locks that other sessions hold. A peer is normal; a stranger is reported by name.
func (g *leadership) refused(ctx context.Context, s *session, keys []int64, wanted map[int64]want) {
	if len(keys) == 0 {
		g.refusals = 0
		return
	}
	g.refusals++
	if g.refusals < strangerAfter || time.Since(g.lastReport["holders"]) < reportEvery {
		return
	}
	g.lastReport["holders"] = time.Now()
	holder, err := s.ask(ctx, g.queries.holder, keys, applicationPrefix)
	if err != nil || holder == nil {
		return
	}
	key, _ := strconv.ParseInt(holder[0], 10, 64) // one of ours
	g.report.failed("a session that is not of this library holds a shard's lock", errors.New("lock held by a stranger"), map[string]any{
		"consumer": wanted[key].claim.consumer, "shard": wanted[key].shard, "lock": key, "pid": holder[1], "application_name": holder[2],
	})
}

// applicationPrefix starts the application_name of every lock session, so that peers know each other.
const applicationPrefix = "pgoutbox "

// reportFailed tells of trouble that may repeat many times a second.
func (g *leadership) reportFailed(what string, err error) {
	if time.Since(g.lastReport[what]) < time.Second {
		return
	}
	g.lastReport[what] = time.Now()
	g.report.failed(what, err, nil)
}
