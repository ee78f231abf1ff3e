package cases_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-52: the user's pool recycles its connections. The lock session is not one of them.
func TestFC52_PoolLifetimesDoNotTouchTheLock(t *testing.T) {
	t.Parallel()
	mustKeepTheLock(t, func(c *pgxpool.Config) {
		c.MaxConnLifetime, c.MaxConnIdleTime, c.HealthCheckPeriod = 2*time.Second, time.Second, 500*time.Millisecond
	})
}

// FC-39: the user's pool resets each connection that it gives out or takes back, which frees every lock of the session.
func TestFC39_DiscardAllOfThePoolsHooksDoesNotTouchTheLock(t *testing.T) {
	t.Parallel()
	reset := func(conn *pgx.Conn) bool {
		_, err := conn.Exec(context.Background(), "DISCARD ALL")
		return err == nil
	}
	mustKeepTheLock(t, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // DISCARD ALL drops the driver's prepared statements
		c.PrepareConn = func(_ context.Context, conn *pgx.Conn) (bool, error) { return reset(conn), nil }
		c.AfterRelease = reset
	})
}

// mustKeepTheLock runs two readers with such pools for a while: the same session holds the locks all the time.
func mustKeepTheLock(t *testing.T, pool func(*pgxpool.Config)) {
	t.Helper()
	ob, s := newOutbox(t), newSink()
	first := newReader(t, pgserver.Pool(t, ob.DSN, pool))
	first.subscribe(t, "first", s, ackAll)
	const shards = 16
	ob.AwaitLocks(shards)
	before := ob.LockSessions()
	second := newReader(t, pgserver.Pool(t, ob.DSN, pool))
	second.subscribe(t, "second", s, ackAll)
	end := time.Now().Add(outboxtest.Length(time.Minute))
	for n := 0; time.Now().Before(end); n++ {
		ob.put(t, fmt.Sprintf("key %d", n%32), fmt.Sprintf("row %d", n))
		outboxtest.Pause(t.Context(), 20*time.Millisecond)
	}
	ob.probe(t, s, 5*time.Second)
	if after := ob.LockSessions(); len(before) != 1 || !slices.Equal(before, after) {
		t.Errorf("the locks were those of process %v, and are of %v", before, after)
	}
	first.close(t)
	second.close(t)
	ob.judge(t, s)
	s.mustHaveComeOnce(t)
	for _, d := range s.by("second") {
		t.Errorf("the owner changed: %s", describe([]delivery{d}))
	}
	for _, line := range first.log.Lines("the lock session ended") {
		t.Error(line)
	}
	ob.MustBeClean()
}
