package pgoutbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Healthy reports why rows may not be delivered now, nil when nothing keeps them: it is what a readiness probe should ask. Every
// cause is named, with the process id and application_name of whoever holds a lock that is wanted. It is unhealthy while
//
//   - the lock session does not answer: the database is away, starting, a standby, or refuses the role;
//   - a consumer cannot be read or created, or its rows cannot be read;
//   - a led shard has rows of which none was acked for StalledAfter;
//   - a session that is not of this library holds a lock that is wanted.
//
// A shard that another process of the group leads is fine. Before the first Subscribe there is nothing to be unhealthy; after Close
// it returns ErrClosed. It sends one statement on the lock session, waits for it no longer than ctx allows, and 5 s at most, and is
// safe for concurrent use.
func (s *Subscriber) Healthy(ctx context.Context) error {
	s.mu.Lock()
	closed, begun := s.isClosing(), s.endSession != nil
	s.mu.Unlock()
	switch {
	case closed:
		return ErrClosed
	case !begun:
		return nil
	}
	return s.leadership.healthy(ctx)
}

// Healthy is Subscriber.Healthy for the bridge. A bridge that is not running is unhealthy.
func (b *PublisherBridge) Healthy(ctx context.Context) error {
	g := b.leads.Load()
	if g == nil {
		return errors.New("pgoutbox: unhealthy: the bridge is not running")
	}
	return g.healthy(ctx)
}

const healthTimeout = 5 * time.Second

// wrong notes what is wrong with something, or with nil that it is well again.
func (g *leadership) wrong(what string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err == nil {
		delete(g.troubles, what)
		return
	}
	if g.troubles == nil {
		g.troubles = map[string]error{}
	}
	g.troubles[what] = err
}

func (g *leadership) healthy(ctx context.Context) error {
	var causes []error
	if err := g.answers(ctx); err != nil {
		causes = append(causes, fmt.Errorf("the lock session: %w", err))
	}
	g.mu.Lock()
	for _, what := range slices.Sorted(maps.Keys(g.troubles)) {
		causes = append(causes, fmt.Errorf("%s: %w", what, g.troubles[what]))
	}
	var followers []follower
	for _, c := range g.claims {
		followers = append(followers, c.follower)
	}
	g.mu.Unlock()
	for _, f := range followers {
		causes = append(causes, f.stalled(time.Now())...)
	}
	if len(causes) == 0 {
		return nil
	}
	return fmt.Errorf("pgoutbox: unhealthy: %w", errors.Join(causes...))
}

// answers asks the session for a proof of life.
func (g *leadership) answers(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, healthTimeout, errors.New("no answer within 5 s"))
	defer cancel()
	_, err := do(ctx, g, true, func(ctx context.Context, s *session) (struct{}, error) {
		_, err := s.ask(ctx, g.queries.alive)
		return struct{}{}, err
	})
	if err == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if ended := g.ended; ended != nil && !errors.Is(err, ended) {
		return fmt.Errorf("%w (it ended before: %w)", err, ended)
	}
	return err
}

// stalled names the shards that have rows of which none was acked for a while.
func (r *reader) stalled(now time.Time) []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []error
	for _, number := range slices.SortedFunc(maps.Keys(r.shards), cmp.Compare) {
		sh := r.shards[number]
		if sh.gone || sh.cursor.unacked == 0 || now.Sub(sh.movedAt) < r.stalledAfter {
			continue
		}
		out = append(out, fmt.Errorf("shard %d of consumer %d: none of its %d rows was acked for %s, the first is row %d",
			number, r.fetcher.consumer.id, sh.cursor.unacked, now.Sub(sh.movedAt).Round(time.Second), sh.cursor.head.id))
	}
	return out
}

// moved notes which shards made progress since the last tick, or have nothing to do. mu is held.
func (r *reader) moved(now time.Time) {
	for _, sh := range r.shards {
		if sh.cursor.unacked == 0 || sh.cursor.acks != sh.movedAcks || sh.movedAt.IsZero() {
			sh.movedAt, sh.movedAcks = now, sh.cursor.acks
		}
	}
}
