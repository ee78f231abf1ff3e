package torture

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
)

// Entrant is a reader in a run.
type Entrant struct {
	Name      string
	Reader    Reader
	Processes int  // that run at the same time; 0 = 1
	SlowAcks  bool // handlers take their time, so that acks come out of order; for readers that can overlap
	Mortal    bool // it is killed, restarted and its sessions are terminated at random
	Refusals  bool // one handler in two hundred fails

	// LockSession is the application_name of the session that a terminated session is taken from; "" = none is.
	LockSession string
	// Patience is how long it may deliver nothing before the run stops waiting for what is missing; 0 = 15 s.
	Patience time.Duration

	history *history
	sink    *sink
	hold    hold

	mu    sync.Mutex
	lives int
	alive map[int]context.CancelCauseFunc // by incarnation
}

// run keeps the entrant's processes alive until ctx ends.
func (e *Entrant) run(ctx context.Context, dsn string) error {
	running, ctx := errgroup.WithContext(ctx)
	for range max(e.Processes, 1) {
		running.Go(func() error { return e.keepAlive(ctx, dsn) })
	}
	return running.Wait()
}

// keepAlive starts a life after the other. Only the harness ends one: a reader that gives up by itself fails the run.
func (e *Entrant) keepAlive(ctx context.Context, dsn string) error {
	for ctx.Err() == nil {
		life, end := context.WithCancelCause(ctx)
		n := e.born(end)
		err := e.Reader.Run(life, dsn, e.deliverer(n))
		cause := context.Cause(life)
		e.died(n)
		end(nil)
		switch {
		case errors.Is(cause, ErrKilled):
		case err != nil:
			return fmt.Errorf("%s, incarnation %d: %w", e.Name, n, err)
		case cause == nil:
			return fmt.Errorf("%s, incarnation %d, ended without being asked to", e.Name, n)
		}
		if ctx.Err() == nil {
			_ = pause(ctx, rand.N(300*time.Millisecond)) // the loop looks at ctx
		}
	}
	return nil
}

func (e *Entrant) born(end context.CancelCauseFunc) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.lives++
	if e.alive == nil {
		e.alive = make(map[int]context.CancelCauseFunc)
	}
	e.alive[e.lives] = end
	return e.lives
}

func (e *Entrant) died(n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.alive, n)
}

// endOne ends a random incarnation for the given cause; false when none is alive.
func (e *Entrant) endOne(cause error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	lives := slices.Collect(maps.Keys(e.alive))
	if len(lives) == 0 {
		return false
	}
	e.alive[lives[rand.IntN(len(lives))]](cause)
	return true
}

// deliverer is the sink as one incarnation sees it.
func (e *Entrant) deliverer(incarnation int) Deliver {
	return func(d Delivery) Ack {
		n := e.sink.deliver(incarnation, d)
		return func(ctx context.Context) error {
			if e.SlowAcks {
				if err := pause(ctx, handlerTime()); err != nil {
					return err
				}
			}
			if err := e.hold.wait(ctx); err != nil {
				return err
			}
			if e.Refusals && rand.IntN(200) == 0 {
				e.sink.refuse(n)
				return ErrRefused
			}
			e.sink.ack(n)
			return nil
		}
	}
}

// handlerTime is mostly nothing, sometimes long enough to be overtaken by many, rarely long.
func handlerTime() time.Duration {
	switch n := rand.IntN(1000); {
	case n < 2:
		return rand.N(300 * time.Millisecond)
	case n < 100:
		return rand.N(40 * time.Millisecond)
	default:
		return 0
	}
}
