package pgoutbox

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5/pgxpool"
)

// feed is the life of one reader: it waits for the consumer to exist, claims its shards, reads until it is told to stop, lets
// what is out finish, stores the position and gives the shards back, in this order.
type feed struct {
	settings

	pool       *pgxpool.Pool
	leadership *leadership
	logger     watermill.LoggerAdapter
	topic      string
	stop       <-chan struct{}      // end emission
	close      <-chan struct{}      // and finish
	reserve    func(consumer) error // asked before the shards of a consumer that await found are claimed; nil: all may be
	reader     readerConfig
	sink       func(*reader) func([]*flight)
}

const withdrawTimeout = time.Second

func (f *feed) run(ctx context.Context, c consumer) {
	emitting, stopEmitting := withStop(ctx, f.stop, f.close)
	defer stopEmitting()
	c, ok := f.await(emitting, c)
	if !ok {
		f.awaitClose(ctx)
		return
	}
	cfg := f.reader
	cfg.window, cfg.liveOnly, cfg.nackDelay, cfg.nackMost = f.window, f.liveOnly, f.nackDelay, f.nackMost
	cfg.maxAttempts, cfg.parkPolicy = f.maxAttempts, f.parkPolicy
	cfg.name, cfg.stalledAfter = fmt.Sprintf("reading consumer %d", c.id), f.stalledAfter
	cfg.values, cfg.report = context.WithoutCancel(ctx), logReporter{f.logger}
	r := newReader(cfg, f.leadership, f.fetcher(c, cfg.report))
	r.sink = f.sink(r)
	claim := f.leadership.claim(c.id, f.shardsOf(c), r)

	r.run(emitting)

	r.stop()
	f.finish(ctx, r)
	r.end(ErrClosed)
	// Emission has ended because a context did, and the position must be stored all the same.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), withdrawTimeout)
	defer cancel()
	if err := f.leadership.withdraw(last, claim, func() []save { return r.collectSaves(time.Now(), 0) }); err != nil {
		f.logger.Error("the last position was not stored, what it covers may be delivered again", err, nil)
	}
}

// fetcher reads the consumer's pages, from the replica where there is one.
func (f *feed) fetcher(c consumer, report reporter) *fetcher {
	out := newFetcher(f.pool, f.names, c)
	if f.readPool != nil {
		out.replica = &replica{pool: f.readPool, state: f.names.query("replica_state"), report: report, home: func() string {
			if home := f.leadership.home.Load(); home != nil {
				return *home
			}
			return ""
		}}
	}
	return out
}

// await returns the consumer, found or created as soon as the database lets it.
func (f *feed) await(ctx context.Context, c consumer) (consumer, bool) {
	what := fmt.Sprintf("the consumer of group %q, topic %q", f.group, f.topic)
	defer func() { f.leadership.wrong(what, nil) }()
	for c.id == 0 {
		found, err := f.findConsumer(ctx, f.leadership, f.topic)
		if err == nil && f.reserve != nil {
			err = f.reserve(found)
		}
		if err == nil {
			return found, true
		}
		if ctx.Err() != nil {
			return c, false
		}
		f.logger.Error("the consumer is not ready, it is tried again", err, nil)
		f.leadership.wrong(what, err)
		pause(ctx, jitter(max(f.retry, time.Second)))
	}
	return c, ctx.Err() == nil
}

// finish waits until nothing is out, for no longer than CloseTimeout after the close began.
func (f *feed) finish(ctx context.Context, r *reader) {
	f.awaitClose(ctx)
	timer := time.NewTimer(f.closeTimeout)
	defer timer.Stop()
	select {
	case <-r.drained:
	case <-timer.C:
	}
}

func (f *feed) awaitClose(ctx context.Context) {
	select {
	case <-f.close:
	case <-ctx.Done():
	}
}

// withStop is ctx, ended by either channel as well.
func withStop(ctx context.Context, stop, closing <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-stop:
		case <-closing:
		case <-ctx.Done():
		}
		cancel()
	})
	return ctx, func() {
		cancel()
		watch.Wait()
	}
}
