package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// LeaderConfig is what a Leader can be told. Name is required; the zero value of every other field is its default.
type LeaderConfig struct {
	Schema, Table string // where the outbox is, whose tables keep the terms: public.outbox
	Name          string // required; processes with the same name share the shards
	Shards        int    // 0 = as stored (16 when the name is new); another number than the stored one is refused
	OnlyShards    []int  // nil = all; the shards that this process may lead

	RetryInterval time.Duration // between tries for shards that other processes lead: 500 ms, ±20 %
	Lease         time.Duration // how long a silent process may keep a shard: 10 s, at least 1 s
	LockConn      string        // DSN of the lock session, "" = the pool's own
	LockBaseID    int64         // goes into the number of every advisory lock; processes of one name need the same
	AllowPooler   bool          // the lock session may pass a pooler, which must be in session mode
}

// Leader runs work of yours under the locks that a Subscriber reads under: one process per shard, fenced by a term, on one
// connection for any number of shards. The outbox's schema must be in place; its rows are not touched.
type Leader struct {
	settings

	pool   *pgxpool.Pool
	logger watermill.LoggerAdapter
}

// NewLeader makes a Leader and checks its configuration, reporting every problem at once. It does not touch the database. A nil
// logger is fine.
func NewLeader(pool *pgxpool.Pool, cfg LeaderConfig, logger watermill.LoggerAdapter) (*Leader, error) {
	s, err := newSettings(pool, SubscriberConfig{
		Schema: cfg.Schema, Table: cfg.Table, ConsumerGroup: cfg.Name, Shards: cfg.Shards, OnlyShards: cfg.OnlyShards,
		RetryInterval: cfg.RetryInterval, Lease: cfg.Lease, LockConn: cfg.LockConn, LockBaseID: cfg.LockBaseID,
		AllowPooler: cfg.AllowPooler,
	})
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: leader: Name is what is called ConsumerGroup here: %w", err)
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	s.poll = s.limits.keepAlive() // there are no rows to look for
	return &Leader{settings: s, pool: pool, logger: logger.With(watermill.LogFields{"leader": cfg.Name, "table": s.names.quoted("")})}, nil
}

// Lead is one shard under the lead of this process, for as long as the context it came with.
type Lead struct {
	Shard int
	Term  int64 // higher than every earlier leader's: let a store that others can write to refuse lower ones

	lead *lead
}

// Run calls lead for every shard that this process leads, each call in a goroutine of its own and never two of one shard at a
// time, until ctx ends; then it waits for the calls, frees the locks and returns nil. A call's context ends with ctx, or with
// cause ErrLeadershipLost as soon as another process may lead the shard. When a call returns, its shard is given up; after
// RetryInterval it is tried for again. An error it returned is logged.
//
// Run survives every error of the database. It returns an error at once when waiting would not help: the schema, a grant, the
// server's version or a setting is wrong.
func (l *Leader) Run(ctx context.Context, lead func(context.Context, Lead) error) error {
	// The session outlives ctx: the locks are freed on it.
	session, endSession := context.WithCancel(context.WithoutCancel(ctx))
	cfg := l.leadershipConfig(l.pool, logReporter{l.logger})
	cfg.lockOnly = true
	g := newLeadership(cfg)
	var running sync.WaitGroup
	running.Go(func() { g.run(session) })
	defer running.Wait()
	defer endSession()
	first, cancel := context.WithTimeoutCause(ctx, firstCallTimeout, errors.New("no answer within 5 s"))
	defer cancel()
	found, err := l.findConsumer(first, g, leaderTopic)
	if isPermanent(err) {
		return fmt.Errorf("pgoutbox: leader: %w", err)
	}
	feed := &feed{settings: l.settings, leadership: g, logger: l.logger, topic: leaderTopic}
	if found, ok := feed.await(ctx, found); ok {
		var shards sync.WaitGroup
		for _, shard := range l.shardsOf(found) {
			shards.Go(func() { l.work(ctx, g, found, shard, lead) })
		}
		shards.Wait()
	}
	return nil
}

// leaderTopic is no topic that a message could have.
const leaderTopic = ""

// work leads one shard again and again.
func (l *Leader) work(ctx context.Context, g *leadership, c consumer, shard int, lead func(context.Context, Lead) error) {
	for ctx.Err() == nil {
		turn := make(handed, 1)
		claim := g.claim(c.id, []int{shard}, turn)
		select {
		case won := <-turn:
			l.call(ctx, won, lead)
		case <-ctx.Done():
		}
		// ctx may have ended, and the lock must be freed all the same.
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
		if err := g.withdraw(last, claim, func() []save { return nil }); err != nil {
			l.logger.Error("a lock was left to the end of the session", err, watermill.LogFields{"shard": shard})
		}
		cancel()
		pause(ctx, jitter(l.retry))
	}
}

func (l *Leader) call(ctx context.Context, won *lead, lead func(context.Context, Lead) error) {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	unlink := context.AfterFunc(won.ctx, func() { end(context.Cause(won.ctx)) })
	defer unlink()
	if err := lead(ctx, Lead{Shard: won.shard, Term: won.term, lead: won}); err != nil && ctx.Err() == nil {
		l.logger.Error("the work under a shard's lock failed, it is started again", err, watermill.LogFields{"shard": won.shard})
	}
}

// handed is the follower of one shard: it passes the lead on.
type handed chan *lead

func (h handed) led(l *lead, _ stored) {
	select {
	case h <- l:
	default: // nobody waits any more: the claim is being withdrawn
	}
}
func (handed) ticked(tick)               {}
func (handed) saves(time.Time) []save    { return nil }
func (handed) unparked([]int)            {}
func (handed) stalled(time.Time) []error { return nil }

// Exec runs one statement on the session that holds the shard's lock: it takes effect only while this process leads the
// shard. It must not begin a transaction, and ends with an error after max(2 s, Lease/4).
//
// ErrLeadershipLost means that it was not run. Any other error that is not the server's leaves open whether it took effect.
func (l Lead) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return onLead(ctx, l, func(ctx context.Context, conn *pgx.Conn) (pgconn.CommandTag, error) {
		return conn.Exec(ctx, sql, args...)
	})
}

// Query is Exec for a statement that returns rows. They are read into memory before it returns, so that the session is free
// for the next proof of life.
func (l Lead) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := onLead(ctx, l, func(ctx context.Context, conn *pgx.Conn) (*bufferedRows, error) {
		rows, err := conn.Query(ctx, sql, args...)
		if err != nil {
			return nil, err
		}
		return bufferRows(rows)
	})
	if err != nil {
		return nil, err
	}
	return rows, nil
}

func onLead[T any](ctx context.Context, l Lead, f func(context.Context, *pgx.Conn) (T, error)) (T, error) {
	var none T
	if l.lead == nil {
		return none, errors.New("pgoutbox: a Lead works only as it came from Leader.Run")
	}
	g := l.lead.of
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	unlink := context.AfterFunc(l.lead.ctx, func() { stop(ErrLeadershipLost) })
	defer unlink()
	value, err := do(ctx, g, false, func(ctx context.Context, s *session) (T, error) {
		if !l.lead.trusted() {
			return none, verdict{ErrLeadershipLost}
		}
		// The server's own bound comes first: it costs the statement, this one costs the session.
		ctx, cancel := context.WithTimeout(ctx, g.limits.statement()+g.limits.lockWait())
		defer cancel()
		value, err := f(ctx, s.conn)
		switch open := !s.conn.IsClosed(); {
		case open && s.conn.PgConn().TxStatus() != 'I':
			err = errors.New("the statement began a transaction on the lock session, which had to be closed")
		case open && err != nil:
			err = verdict{err} // the server's, or an argument that did not fit: the session is as it was
		}
		return value, err
	})
	if err != nil {
		return none, fmt.Errorf("pgoutbox: shard %d: %w", l.lead.shard, err)
	}
	return value, nil
}
