package cases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-12: somebody leaves a transaction open. Rows of others must not wait for it, whatever it did.
func TestFC12_OpenTransactionDelaysNobody(t *testing.T) {
	t.Parallel()
	sessions := []struct {
		name string
		open func(*testing.T, *outbox) (end func())
	}{
		{"wrote an unrelated table", func(t *testing.T, ob *outbox) func() {
			ob.Exec("CREATE TABLE unrelated (n int)")
			return openWith(t, ob.begin(t), "INSERT INTO unrelated VALUES (1)")
		}},
		{"only reads, as a dump does", func(t *testing.T, ob *outbox) func() {
			tx, err := ob.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
			must(t, err)
			return openWith(t, tx, "SELECT count(*) FROM outbox")
		}},
		{"wrote in another database", func(t *testing.T, _ *outbox) func() {
			tx, err := pgserver.Pool(t, pgserver.Database(t)).Begin(t.Context())
			must(t, err)
			return openWith(t, tx, "CREATE TABLE unrelated (n int)")
		}},
		{"published itself", func(t *testing.T, ob *outbox) func() {
			w := ob.begin(t)
			must(t, w.publish("key", "early"))
			return func() { must(t, w.Commit(t.Context())) }
		}},
		{"builds an index concurrently", buildIndex},
	}
	for _, session := range sessions {
		t.Run(session.name, func(t *testing.T) {
			t.Parallel()
			ob := newOutbox(t)
			openTransaction(t, ob, session.open)
		})
	}
}

func openTransaction(t *testing.T, ob *outbox, open func(*testing.T, *outbox) func()) {
	const (
		poll  = 2 * time.Second
		bound = 2 * poll // shorter than the transaction stays open
	)
	s := newSink()
	r := ob.read(t, "P1", s, ackAll, func(c *pgoutbox.SubscriberConfig) { c.PollInterval = poll })
	ob.AwaitLocks(16)

	end := open(t, ob)
	until := time.Now().Add(outboxtest.Length(60 * time.Second))
	var uuids []string
	for n := range 100 {
		uuids = append(uuids, fmt.Sprintf("m%d", n))
		ob.put(t, fmt.Sprintf("key %d", n%7), uuids[n])
	}
	s.await(t, bound, uuids...)
	for time.Now().Before(until) {
		ob.probe(t, s, bound)
		outboxtest.Pause(t.Context(), time.Second)
	}
	end()
	ob.probe(t, s, 5*time.Second)
	ob.judge(t, s)
	r.close(t)
	s.mustHaveComeOnce(t)
}

func openWith(t *testing.T, tx pgx.Tx, sql string) (end func()) {
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
	_, err := tx.Exec(t.Context(), sql)
	must(t, err)
	return func() { must(t, tx.Commit(t.Context())) }
}

// buildIndex starts CREATE INDEX CONCURRENTLY on the outbox, which waits for a writer that stays.
func buildIndex(t *testing.T, ob *outbox) func() {
	writer := ob.begin(t)
	must(t, writer.publish("key", "of the writer that stays"))
	built := make(chan error, 1)
	go func() { // ends when the writer does; the end of the test cancels it
		_, err := ob.Pool.Exec(t.Context(), "CREATE INDEX CONCURRENTLY by_time ON outbox (created_at)")
		built <- err
	}()
	outboxtest.Eventually(t, 10*time.Second, "the build of the index waits for the writer", func() (bool, string) {
		phase := outboxtest.Ask[string](ob.Outbox, "SELECT coalesce(max(phase), 'not begun') FROM pg_stat_progress_create_index WHERE datname = current_database()")
		return phase == "waiting for writers before build", phase
	})
	return func() {
		must(t, writer.Commit(t.Context()))
		must(t, <-built)
	}
}
