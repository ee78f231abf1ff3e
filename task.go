package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// task is work for the session goroutine. An error that run returns ends the session; fail says why it was not run.
type task struct {
	ctx  context.Context // of whoever waits; run itself is bounded by the session
	run  func(context.Context, *session) error
	fail func(error)
	once bool // give up when no session can be opened
}

// do runs f on the lock session, between two ticks. It returns what f returns, or the reason why f did not run: ctx ended,
// everything was closed, or, with once, a session could not be opened. When ctx ends while f runs, f may still take
// effect: cutting it short would cost the session, and every lock with it.
func do[T any](ctx context.Context, g *leadership, once bool, f func(context.Context, *session) (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	done := make(chan outcome, 1)
	g.enqueue(&task{
		ctx: ctx, once: once,
		run: func(ctx context.Context, s *session) error {
			value, err := f(ctx, s)
			done <- outcome{value, err}
			if fatal(err) && !isVerdict(err) {
				return err
			}
			return nil
		},
		fail: func(err error) { done <- outcome{err: err} },
	})
	select {
	case o := <-done:
		return o.value, o.err
	case <-ctx.Done():
		var none T
		return none, fmt.Errorf("wait for the lock session: %w", context.Cause(ctx))
	}
}

func (g *leadership) enqueue(t *task) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tasks = append(g.tasks, t)
	g.wakeLocked()
}

// verdict is an error of ours about what the server said; it says nothing against the session.
type verdict struct{ error }

func (v verdict) Unwrap() error { return v.error }

func isVerdict(err error) bool {
	var v verdict
	return errors.As(err, &v) || isPermanent(err)
}

func (g *leadership) runTasks(ctx context.Context, s *session) error {
	g.mu.Lock()
	tasks := g.tasks
	g.tasks = nil
	g.mu.Unlock()
	for i, t := range tasks {
		if t.ctx.Err() != nil {
			t.fail(context.Cause(t.ctx))
			continue
		}
		if err := t.run(ctx, s); err != nil {
			g.mu.Lock()
			g.tasks = append(tasks[i+1:], g.tasks...)
			g.mu.Unlock()
			return err
		}
	}
	return nil
}

// failTasks ends the tasks that cannot wait for another session; all of them when nobody opens one any more.
func (g *leadership) failTasks(err error, onlyOnce bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tasks = slices.DeleteFunc(g.tasks, func(t *task) bool {
		if onlyOnce && !t.once && t.ctx.Err() == nil {
			return false
		}
		t.fail(err)
		return true
	})
}

// claim asks for the shards of a consumer. They come by and by, through the follower.
func (g *leadership) claim(consumer int64, shards []int, f follower) *claim {
	c := &claim{consumer: consumer, keys: map[int]int64{}, follower: f, held: map[int]*lead{}}
	for _, shard := range shards {
		c.keys[shard] = lockKey(g.lockBase, g.names, consumer, shard)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.claims = append(g.claims, c)
	g.tasks = append(g.tasks, &task{ctx: context.Background(), fail: func(error) {}, run: func(context.Context, *session) error {
		g.nextTry = time.Time{}
		return nil
	}})
	g.wakeLocked()
	return c
}

func (g *leadership) claimed(c *claim) bool { return slices.Contains(g.claims, c) }

// withdraw gives a claim up: stores the last positions, frees the locks. The leads end without a cause. When ctx ends
// first, or the session is lost, the rest is left to the end of the session.
func (g *leadership) withdraw(ctx context.Context, c *claim, last func() []save) error {
	_, err := do(ctx, g, true, func(ctx context.Context, s *session) (struct{}, error) {
		return struct{}{}, g.giveBack(ctx, s, c, last())
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.claims = slices.DeleteFunc(g.claims, func(other *claim) bool { return other == c })
	for shard, l := range c.held {
		delete(c.held, shard)
		l.end(errReleased)
	}
	return err
}

func (g *leadership) giveBack(ctx context.Context, s *session, c *claim, last []save) error {
	g.mu.Lock()
	g.claims = slices.DeleteFunc(g.claims, func(other *claim) bool { return other == c })
	var keys []int64
	for _, l := range c.held {
		keys = append(keys, l.key)
	}
	g.mu.Unlock()
	if len(keys) == 0 {
		return nil
	}
	if err := g.store(ctx, s, last); err != nil {
		return err
	}
	if err := g.release(ctx, s, c); err != nil {
		return err
	}
	if err := g.unlock(ctx, s, keys); err != nil {
		return err
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	for shard, l := range c.held {
		delete(c.held, shard)
		l.end(errReleased)
	}
	g.nextTry = time.Time{} // another claim of this session may want them
	return nil
}

// release says in the database that the shards are given back with nothing out.
func (g *leadership) release(ctx context.Context, s *session, c *claim) error {
	var shards, terms []int64
	g.mu.Lock()
	for _, l := range c.held {
		shards, terms = append(shards, int64(l.shard)), append(terms, l.term)
	}
	g.mu.Unlock()
	results, err := s.roundTrip(ctx, request{sql: g.queries.release, args: []any{s.token, c.consumer, shards, terms}})
	if err != nil {
		return fmt.Errorf("release: %w", err)
	}
	_, err = g.written(results[0])
	return err
}

func (g *leadership) unlock(ctx context.Context, s *session, keys []int64) error {
	results, err := s.roundTrip(ctx, request{sql: g.queries.unlock, args: []any{keys}})
	if err != nil {
		return fmt.Errorf("unlock: %w", err)
	}
	if results[0].Err != nil {
		return fmt.Errorf("unlock, and nobody knows which were freed: %w", results[0].Err)
	}
	for _, row := range results[0].Rows {
		if string(row[1]) != "t" {
			return errors.New("unlock: a lock that the session believed to hold was gone")
		}
	}
	return nil
}
