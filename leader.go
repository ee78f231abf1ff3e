package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
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
	troubles  map[string]error // what is wrong now, by what it concerns
	ended     error            // why the last session ended, nil while there is one
	claims    []*claim
	tasks     []*task
	interrupt context.CancelFunc // ends the wait on the socket
	woken     bool               // something to do came while nobody was waiting
	urgent    bool               // a tick is wanted now
	watchdog  *time.Timer

	home     atomic.Pointer[string]    // what the server is called, asked where replicas may serve
	dirty    atomic.Bool               // a follower has something to store
	answered atomic.Pointer[time.Time] // when the last answered poll was sent; nil: nothing is led

	// The session goroutine's own.
	epochs     []epoch // the servers that held the outbox, this one last
	n          uint64  // ticks
	high       int64   // the highest id that counts as visible
	stray      int64   // the highest committed id that was probed
	lastTick   time.Time
	nextProbe  time.Time
	nextLook   time.Time // for parked rows that are asked for
	nextTry    time.Time
	lastSave   time.Time
	refusals   int  // tries in a row that other sessions held a lock
	strange    bool // and one of them is not a peer
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
	replicas bool // may serve pages: a tick tells how far the log goes
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
	unparked(shards []int)      // parked rows of these are to be delivered again
	stalled(now time.Time) []error
}

// claim is what one follower wants to lead. held is guarded by leadership.mu.
type claim struct {
	consumer int64
	keys     map[int]int64 // the lock of each shard
	follower follower
	held     map[int]*lead
}

type leaderQueries struct {
	position, home, alive, mark, snapshot, xmax, probe, lock, unlock, holder, takeOver, save, stage, release string
	check, epochs, identity, rebaseLock, rebaseMarks, rebase, consumer, createConsumer                       string
	park, parkedKeys, unpark, unparkKeys, unparkedRows, unparkedShards                                       string
}

const (
	busyGap       = 2 * time.Millisecond // between ticks while there is work
	probeInterval = 10 * time.Second     // between looks for ids above the sequence
	lookInterval  = time.Second          // between looks for parked rows that are asked for
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
			position: n.query("wal_position"), home: n.query("home"),
			alive: n.query("tick_alive"), mark: n.query("tick_mark"), snapshot: n.query("tick_snapshot"), xmax: n.query("xmax"),
			probe: n.query("tick_stray"), lock: n.query("lock"), unlock: n.query("unlock"), holder: n.query("lock_holder"),
			takeOver: n.query("take_over"), save: n.query("save"), stage: n.query("stage"),
			check: n.query("check"), epochs: n.query("epochs"), identity: n.query("system_identifier"),
			rebaseLock: n.query("rebase_lock"), rebaseMarks: n.query("rebase_marks"), rebase: n.query("rebase"),
			consumer: n.query("consumer"), createConsumer: n.query("create_consumer"), release: n.query("release"),
			park: n.query("park"), parkedKeys: n.query("parked_keys"), unpark: n.query("unpark"), unparkKeys: n.query("unpark_keys"),
			unparkedRows: n.query("unparked_rows"), unparkedShards: n.query("unparked_shards"),
		},
		lastReport: map[string]time.Time{},
	}
}

// run keeps a session until ctx ends. It survives every error of the database.
func (g *leadership) run(ctx context.Context) {
	wait := g.retry
	for {
		opened := time.Now()
		err := g.hold(ctx)
		g.lose()
		if ctx.Err() != nil {
			g.failTasks(ErrClosed, false)
			return
		}
		g.mu.Lock()
		g.ended = err
		g.mu.Unlock()
		g.wrong(strangerHolds, nil) // nobody knows any more
		g.failTasks(err, true)
		g.reportFailed("the lock session ended, a new one is opened", err)
		if time.Since(opened) > g.limits.lease {
			wait = g.retry
		}
		pause(ctx, jitter(wait))
		wait = min(2*wait, max(g.retry, 2*time.Second))
	}
}

func jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.4*rand.Float64()))
}

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
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
	if g.replicas {
		if err := g.learnHome(opening, s); err != nil {
			return err
		}
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
	if !g.leading() {
		return g.lastTick.Add(g.limits.keepAlive()) // whoever stands by only tries the locks
	}
	return g.lastTick.Add(min(g.poll, g.limits.keepAlive()))
}

// leading reports whether any shard is led. mu is held.
func (g *leadership) leading() bool {
	return slices.ContainsFunc(g.claims, func(c *claim) bool { return len(c.held) > 0 })
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

func (g *leadership) trusted() bool {
	sent := g.answered.Load()
	return sent != nil && g.trustedSince(*sent, time.Now())
}

func (g *leadership) trustedSince(sent, now time.Time) bool {
	return trusts(sent, now, g.limits.lease, g.limits.margin())
}

// expire is the watchdog: nothing has proved the session for too long.
func (g *leadership) expire() {
	if !g.trusted() {
		g.lose()
	}
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

// reportFailed tells of trouble that may repeat many times a second.
func (g *leadership) reportFailed(what string, err error) {
	if time.Since(g.lastReport[what]) < time.Second {
		return
	}
	g.lastReport[what] = time.Now()
	g.report.failed(what, err, nil)
}
