package cases_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-21: the user's pool is small and handlers use it, too.
func TestFC21_SmallPoolIsEnough(t *testing.T) {
	t.Parallel()
	for _, conns := range []int32{1, 2, 4} {
		t.Run(fmt.Sprintf("%d connections", conns), func(t *testing.T) {
			t.Parallel()
			ob, s, waits := newOutbox(t), newSink(), &acquireTracer{}
			pool := pgserver.Pool(t, ob.DSN, func(c *pgxpool.Config) {
				c.MaxConns = conns
				c.ConnConfig.Tracer = waits
			})
			pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{}, nil)
			must(t, err)
			for n := range 100 {
				ob.put(t, fmt.Sprintf("key %d", n%30), fmt.Sprintf("m%d", n))
			}
			r := newReader(t, pool, func(c *pgoutbox.SubscriberConfig) { c.Shards = 4 })
			r.subscribe(t, "P1", s, func(ctx context.Context, d delivery) error {
				var one int
				if err := pool.QueryRow(ctx, "SELECT 1 FROM pg_sleep(0.001)").Scan(&one); err != nil {
					return err
				}
				msg := message.NewMessage("echo of "+d.UUID, nil)
				msg.SetContext(ctx)
				return pub.Publish("echo", msg)
			})
			var uuids []string
			for _, one := range ob.oracle() {
				uuids = append(uuids, one.uuid)
			}
			s.await(t, 30*time.Second, uuids...)
			ob.judge(t, s)
			r.close(t)
			s.mustHaveComeOnce(t)
			if n := outboxtest.Ask[int](ob.Outbox, "SELECT count(*) FROM outbox WHERE topic = 'echo'"); n != 100 {
				t.Errorf("the handlers published %d messages, want 100", n)
			}
			if waits.longest > 10*time.Second {
				t.Errorf("somebody waited %s for a connection", waits.longest)
			}
			for _, line := range r.log.Errors() {
				t.Error(line)
			}
		})
	}
}

// acquireTracer measures the waits for connections of a pool.
type acquireTracer struct {
	queryTracer

	mu      sync.Mutex
	longest time.Duration
}

type acquireKey struct{}

func (*acquireTracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	return context.WithValue(ctx, acquireKey{}, time.Now())
}

func (a *acquireTracer) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireEndData) {
	began, _ := ctx.Value(acquireKey{}).(time.Time)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.longest = max(a.longest, time.Since(began))
}

// queryTracer does nothing; pgx takes a tracer of acquisitions only from one of queries.
type queryTracer struct{}

func (queryTracer) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (queryTracer) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
