package cases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-15: our sessions wait, or hold their locks, within a transaction. Then nobody can build an index or clean a table.
func TestFC15_NoSessionOfOursHoldsATransaction(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	ob.Exec("CREATE TABLE unrelated AS SELECT generate_series(1, 1000) AS n")
	working, done := make(chan struct{}), t.Context().Done()
	slow := func(ctx context.Context, d delivery) error {
		if d.UUID[0] != 'm' {
			return nil
		}
		select {
		case <-working:
		case <-ctx.Done():
		case <-done:
		}
		return nil
	}
	readers := []*reader{ob.read(t, "P1", s, slow)}
	ob.AwaitLocks(16)
	for _, name := range []string{"P2", "P3", "P4"} {
		readers = append(readers, ob.read(t, name, s, slow))
	}
	var uuids []string
	for n := range 20 {
		uuids = append(uuids, fmt.Sprintf("m%d", n))
		ob.put(t, fmt.Sprintf("key %d", n), uuids[n])
	}
	s.await(t, 10*time.Second, uuids...)

	sampling, stop := context.WithCancel(t.Context())
	sampled := make(chan string, 1)
	go func() { sampled <- sample(sampling, ob) }() // waited for below
	until := time.Now().Add(outboxtest.Length(60 * time.Second))

	for _, build := range []string{"CREATE INDEX CONCURRENTLY ours ON outbox (created_at)", "CREATE INDEX CONCURRENTLY theirs ON unrelated (n)"} {
		began := time.Now()
		ob.Exec(build)
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("%s took %s", build, took)
		}
	}
	dead(t, ob)
	for time.Now().Before(until) {
		ob.probe(t, s, 5*time.Second) // the handlers of the others still work
		outboxtest.Pause(t.Context(), time.Second)
	}
	stop()
	if trouble := <-sampled; trouble != "" {
		t.Error(trouble)
	}
	close(working)
	ob.judge(t, s)
	for _, r := range readers {
		r.close(t)
	}
	s.mustHaveComeOnce(t)
	ob.MustBeClean()
}

// dead makes rows that nobody can see any more and demands that VACUUM takes them away.
func dead(t *testing.T, ob *outbox) {
	t.Helper()
	w := ob.begin(t)
	must(t, w.publish("", make([]string, 1000)...))
	must(t, w.Rollback(t.Context()))
	outboxtest.Eventually(t, 20*time.Second, "VACUUM removes the dead rows", func() (bool, string) {
		ob.Exec("VACUUM outbox")
		left := outboxtest.Ask[int](ob.Outbox, `SELECT n_dead_tup::int FROM pg_stat_user_tables WHERE relname = 'outbox'`)
		return left == 0 && outboxtest.Ask[int](ob.Outbox, "SELECT vacuum_count::int FROM pg_stat_user_tables WHERE relname = 'outbox'") > 0,
			fmt.Sprintf("%d left", left)
	})
}

// sample looks at the readers' sessions until ctx ends, and returns what is wrong with them.
func sample(ctx context.Context, ob *outbox) (trouble string) {
	conn, err := pgx.Connect(ctx, ob.DSN)
	if err != nil {
		return err.Error()
	}
	defer conn.Close(context.WithoutCancel(ctx))
	for n := 0; ; n++ {
		var seen string
		err := conn.QueryRow(ctx, `
			SELECT coalesce(string_agg(format('%s is %s in %L, waits for %s %s, has a snapshot: %s, since %s', application_name, state,
				query, wait_event_type, wait_event, backend_xmin IS NOT NULL, clock_timestamp() - xact_start), '; '), '')
			FROM pg_stat_activity
			WHERE datname = current_database()
				AND (application_name LIKE 'pgoutbox %' OR application_name = 'reader''s pool')
				AND (state LIKE 'idle in transaction%'
					OR wait_event_type = 'Lock'
					OR backend_xmin IS NOT NULL AND clock_timestamp() - xact_start > interval '1 s')`).Scan(&seen)
		switch {
		case ctx.Err() != nil && n > 10:
			return ""
		case err != nil:
			return fmt.Sprintf("sample %d: %v", n, err)
		case seen != "":
			return seen
		}
		outboxtest.Pause(ctx, 100*time.Millisecond)
	}
}
