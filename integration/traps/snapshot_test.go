package traps

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Under repeatable read a table that an ALTER TABLE rewrote meanwhile has no rows, and no error says so. The reader must not
// inherit that from its role. The page is made to wait for the ALTER, and a twin with the role's default reads beside it.
func TestPagesOutliveARewriteWhateverTheRolesDefault(t *testing.T) {
	t.Parallel()
	for _, level := range []string{"repeatable read", "serializable"} {
		for name, alter := range map[string]string{
			"a column more": "ALTER TABLE outbox ADD COLUMN extra text DEFAULT gen_random_uuid()::text",
			"another type":  "ALTER TABLE outbox ALTER COLUMN created_at TYPE timestamptz(3)",
		} {
			t.Run(level+", "+name, func(t *testing.T) {
				t.Parallel()
				rewriteUnderPages(newOutbox(t), level, alter)
			})
		}
	}
}

func rewriteUnderPages(db *outbox, level, alter string) {
	pool, name := db.newPool(outboxtest.Setting("default_transaction_isolation", level))
	rows := numbered("row", 1500)
	db.put(db.Pool, rows...)
	cfg := inOrder()
	cfg.Window = 1000 // a first page, and the second when some of it is acked
	release := make(chan struct{})
	r := db.receive(pool, cfg, func(outboxtest.Delivery) bool {
		<-release
		return true
	})
	r.until(rows[0])
	altering := db.Begin()
	db.ExecOn(altering, alter)

	twin := pgserver.Pool(db.TB, db.DSN, outboxtest.Setting("application_name", "twin"), outboxtest.Setting("default_transaction_isolation", level))
	old, err := twin.Begin(db.Context())
	if err != nil {
		db.Fatal(err)
	}
	defer func() { _ = old.Rollback(context.WithoutCancel(db.Context())) }()
	db.ExecOn(old, "SELECT 1") // whatever a page does before it reads
	var twinSaw int
	var reading sync.WaitGroup
	reading.Go(func() {
		if err := old.QueryRow(db.Context(), "SELECT count(*) FROM outbox").Scan(&twinSaw); err != nil {
			db.Error(err)
		}
	})
	db.blocked("twin", 1)
	close(release)
	db.blocked(name, 1) // the second page
	db.Commit(altering)
	reading.Wait()
	if twinSaw != 0 {
		db.Errorf("the trap is none: the twin saw %d rows", twinSaw)
	}
	r.exactly(rows...)
}

// blocked waits until sessions of that name wait for a lock.
func (db *outbox) blocked(name string, sessions int) {
	db.Helper()
	db.Eventually(name+" waits for a lock", `
		SELECT count(*) >= $2 FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = $1 AND wait_event_type = 'Lock'`, name, sessions)
}

// While the table is rewritten again and again, nothing is lost and nothing comes twice.
func TestRewritesOfTheTableLoseNothing(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	pool, _ := db.newPool(outboxtest.Setting("default_transaction_isolation", "serializable"))
	r := db.receive(pool, inOrder(), nil)
	r.settle()
	var writing sync.WaitGroup
	rows := numbered("row", 300)
	writing.Go(func() {
		for i := 0; i < len(rows); i += 3 {
			if _, err := db.Pool.Exec(db.Context(),
				"INSERT INTO outbox (topic, key, uuid) SELECT 't', 'k', unnest($1::text[])", rows[i:i+3]); err != nil {
				t.Error(err)
			}
		}
	})
	for i := range 10 {
		db.Exec(fmt.Sprintf("ALTER TABLE outbox ADD COLUMN extra%d text DEFAULT gen_random_uuid()::text", i))
		db.Exec(fmt.Sprintf("ALTER TABLE outbox DROP COLUMN extra%d", i))
	}
	writing.Wait()
	r.exactly(rows...)
}

// A transaction's own id is never in the list of its snapshot. A consumer that is created with such a snapshot would skip the
// rows that its creator has yet to commit.
func TestLatestKeepsTheCreatorsOwnOpenTransaction(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.put(db.Pool, "old 1", "old 2")
	pool, _ := db.newPool(func(c *pgxpool.Config) { c.MaxConns = 1 }) // and the creator has it
	creator, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = creator.Rollback(context.WithoutCancel(t.Context())) }()
	db.put(creator, "own")
	db.put(db.Pool, "old 3")
	var hidden bool
	err = creator.QueryRow(t.Context(), "SELECT pg_visible_in_snapshot(pg_current_xact_id(), pg_current_snapshot())").Scan(&hidden)
	if err != nil || !hidden {
		t.Fatalf("the trap is none: %v, %v", hidden, err)
	}
	cfg := inOrder()
	cfg.StartFrom = pgoutbox.Latest
	sub, err := pgoutbox.NewSubscriber(pool, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.SubscribeInitialize(pgoutbox.AllTopics); err != nil {
		t.Fatal(err)
	}
	if err := sub.Close(); err != nil {
		t.Fatal(err)
	}
	db.put(creator, "own too")
	db.Commit(creator)
	r := db.receive(pool, cfg, nil)
	r.exactly("own", "own too")
}

// Whoever stands by has a tick in memory that is older than the position it takes over. Used as the end of a batch it would
// turn the position back, and everything since would come again.
func TestTakeOverNeedsATickOfItsOwn(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	first := db.receive(db.Pool, inOrder(), nil)
	first.settle()
	leader := db.Text("SELECT pid FROM pg_stat_activity WHERE " + outboxtest.IsLockSession)
	cfg := inOrder()
	cfg.Lease = 20 * time.Second // whoever stands by ticks every 5 s
	second := db.receive(db.Pool, cfg, nil)
	const standby = "SELECT bool_or(query LIKE $2) FROM pg_stat_activity WHERE pid <> $1::text::int AND " + outboxtest.IsLockSession
	db.Eventually("the second tries for the lock", standby, leader, "%pg_try_advisory_lock%")
	db.Eventually("the second ticks", standby, leader, "%last_value%")
	rows := numbered("row", 50)
	db.put(db.Pool, rows[:25]...)
	first.until(rows[:25]...)
	db.put(db.Pool, rows[25:]...)
	first.until(rows...)
	first.close()
	second.exactly()
}

// After any loss of the lock session the position is read again, and exactly the un-acked rows come again.
func TestLostSessionRepeatsTheUnackedRowsOnly(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	cfg := inOrder()
	cfg.Ordering = pgoutbox.OrderByKey
	open := db.Begin()
	db.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 't', 'k' || i, 'row ' || i FROM generate_series(1, 30) AS i")
	db.put(open, "late 1")
	hold := map[string]bool{"row 3": true, "row 17": true}
	r := db.receive(db.Pool, cfg, func(d outboxtest.Delivery) bool { return !hold[d.UUID] || d.Term > 1 })
	r.until(numbered("row", 30)...)
	db.Eventually("exactly the two un-acked rows are saved", `
		SELECT cardinality(pending) = 2 AND after_high >= 30 FROM outbox_cursors`)
	if n := db.Text("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE " + outboxtest.IsLockSession); n != "1" {
		t.Fatalf("%s lock sessions were ended", n)
	}
	for _, d := range r.All() {
		if hold[d.UUID] {
			<-d.Message.Context().Done()
			if cause := context.Cause(d.Message.Context()); cause != pgoutbox.ErrLeadershipLost { //nolint:errorlint // the cause itself
				t.Errorf("the context of %s ended with %v", d.UUID, cause)
			}
		}
	}
	db.Commit(open)
	r.until("late 1")
	r.settle()
	times := map[string]int{}
	for _, d := range r.All() {
		times[d.UUID]++
	}
	for uuid, n := range times {
		if want := map[bool]int{false: 1, true: 2}[hold[uuid]]; n != want {
			t.Errorf("%s came %d times, want %d", uuid, n, want)
		}
	}
}

// While the lock session is ended again and again, with transactions that stay open over it, nothing is lost, and nothing
// acked and saved comes again.
func TestSessionsEndInTheMiddleOfBatches(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	r := db.receive(db.Pool, inOrder(), nil)
	r.settle()
	var all []string
	for round := range 6 {
		open := db.Begin()
		late := fmt.Sprintf("late %d", round)
		db.put(open, late)
		rows := numbered(fmt.Sprintf("round %d row", round), 50)
		db.put(db.Pool, rows[:25]...)
		r.until(rows[0])
		db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE " + outboxtest.IsLockSession)
		db.put(db.Pool, rows[25:]...)
		db.Commit(open)
		r.until(append(rows, late)...)
		all = append(append(all, rows...), late)
		db.saved()
	}
	r.settle()
	terms := map[string]map[int64]int{}
	for _, d := range r.All() {
		if terms[d.UUID] == nil {
			terms[d.UUID] = map[int64]int{}
		}
		terms[d.UUID][d.Term]++
	}
	for _, uuid := range all {
		for term, n := range terms[uuid] {
			if n != 1 {
				t.Errorf("%s came %d times in term %d", uuid, n, term)
			}
		}
		if len(terms[uuid]) > 2 {
			t.Errorf("%s came again although it had been saved: terms %v", uuid, terms[uuid])
		}
	}
}

// A server that crashes forgets the transactions it had not yet written to its log, and hands their ids out again. A position
// kept in memory over the crash would say of the new rows that they were read.
func TestCrashHandsTransactionIDsOutAgain(t *testing.T) {
	s, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf, Settings: map[string]string{
		"autovacuum": "off", "wal_writer_delay": "10s", "wal_level": "minimal", "max_wal_senders": "0", "checkpoint_timeout": "1h",
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if s.DataDir() == "" {
		t.Skipf("%s is not ours to crash; PGOUTBOX_TEST_PROVIDER=local starts one that is", s.Provider())
	}
	db := migrated(t, s.Database(t))
	r := db.receive(db.Pool, inOrder(), nil)
	r.settle()
	db.saved()
	for attempt := 1; ; attempt++ { // the server may write its log at any time, and does so after most commits when it was idle before
		forgotten := numbered(fmt.Sprintf("forgotten %d", attempt), 30)
		for _, uuid := range forgotten {
			db.ExecOn(db.Pool, "BEGIN; SET LOCAL synchronous_commit = off; INSERT INTO outbox (topic, key, uuid) VALUES ('t', 'k', '"+uuid+"'); COMMIT")
		}
		r.until(forgotten...)
		before := db.xid(0)
		if err := s.Restart(t.Context(), "immediate"); err != nil {
			t.Fatal(err)
		}
		db.reconnect()
		kept := db.number("SELECT count(*) FROM outbox WHERE uuid LIKE $1", fmt.Sprintf("forgotten %d %%", attempt))
		again := db.xid(0)
		t.Logf("attempt %d: of %d commits the crash left %d; the next transaction id was %d and is %d", attempt, len(forgotten), kept, before, again)
		fresh := numbered(fmt.Sprintf("fresh %d", attempt), 3)
		for _, uuid := range fresh {
			db.put(db.Pool, uuid)
		}
		r.until(fresh...)
		if again+uint64(len(fresh)) < before { // the new rows bear ids that had been seen to end
			r.settle()
			return
		}
		if attempt == 25 {
			t.Fatal("the server never forgot enough")
		}
	}
}

// reconnect waits until the pool has a connection that works.
func (db *outbox) reconnect() {
	db.Pool.Reset()
	db.Eventually("the server is back", "SELECT true")
}
