package promises

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// TestPromise04_NoStall leaves each kind of transaction open and wants what others write within 2 s.
func TestPromise04_NoStall(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	db.read("reader", got, pgoutbox.SubscriberConfig{}, ack)
	db.publish(nil, "", "warm")
	got.until("warm")
	probe := func(name string) {
		t.Helper()
		for i := range 3 { // the second and third are read from positions that were taken with the transaction open
			uuid := fmt.Sprintf("probe %d beside %s", i, name)
			db.publish(nil, "key", uuid)
			got.within(2*time.Second, uuid)
		}
	}

	writer := db.begin(db.DSN)
	db.publish(writer, "key", "of the open writer")
	probe("an open transaction that wrote to the outbox")

	elsewhere := db.begin(pgserver.Database(t))
	_, err := elsewhere.Exec(t.Context(), "CREATE TABLE anything ()")
	db.Must(err)
	probe("an open transaction in another database")

	prepared := db.begin(db.DSN)
	db.publish(prepared, "key", "of the prepared transaction")
	_, err = prepared.Exec(t.Context(), "PREPARE TRANSACTION 'promise 4'")
	db.Must(err)
	probe("a prepared transaction")

	db.Exec("COMMIT PREPARED 'promise 4'")
	got.within(2*time.Second, "of the prepared transaction")
	db.Must(writer.Commit(t.Context()))
	got.within(2*time.Second, "of the open writer")
}

// TestPromise05_WritersAreFree keeps a transaction with an INSERT open through everything that a reader does. A lock of ours
// that conflicts with an INSERT would wait for it, and so would the rows.
func TestPromise05_WritersAreFree(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	open := db.begin(db.DSN)
	_, err := open.Exec(t.Context(), "INSERT INTO outbox (topic, key) VALUES ('orders', 'one key')")
	db.Must(err)
	for _, name := range []string{"first", "second"} { // to take over, read, save and hand over
		r := db.read(name, got, pgoutbox.SubscriberConfig{}, ack)
		db.publish(nil, "one key", "for the "+name) // nor do two writers of one key wait for each other
		got.until("for the " + name)
		r.end()
	}

	// Nor has it any but the weakest while it stands by for a handler.
	held := make(chan struct{})
	reached := make(chan struct{}, 1)
	db.read("third", got, pgoutbox.SubscriberConfig{}, func(*message.Message, pgoutbox.Row) bool {
		reached <- struct{}{}
		<-held
		return true
	})
	defer close(held)
	db.publish(nil, "", "in a handler")
	outboxtest.Next(t, "a handler runs", reached)
	for range 20 {
		conflicts := db.Text(`
			SELECT count(*)::text FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
			WHERE l.relation IN ('outbox'::regclass, 'outbox_pkey'::regclass) AND a.application_name LIKE 'pgoutbox %'
				AND l.mode <> 'AccessShareLock'`)
		if conflicts != "0" {
			t.Fatalf("the reader has %s locks on the outbox that others could wait for", conflicts)
		}
	}

	counted := &counter{}
	pool := pgserver.Pool(t, db.DSN, func(c *pgxpool.Config) { c.ConnConfig.Tracer = counted })
	for _, n := range []int{1, 1000} {
		messages := make([]*message.Message, n)
		for i := range messages {
			messages[i] = newMessage(t.Context(), "one key", fmt.Sprint(i))
		}
		db.Must(pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			before := counted.Load()
			err := db.Pub.WithTx(tx).Publish("elsewhere", messages...)
			if sent := counted.Load() - before; sent != 1 {
				t.Errorf("publishing %d messages took %d statements", n, sent)
			}
			return err
		}))
	}
	if n := db.Text("SELECT count(*)::text FROM pg_trigger WHERE tgrelid = 'outbox'::regclass"); n != "0" {
		t.Errorf("%s triggers run with an INSERT", n)
	}
}

// counter counts statements.
type counter struct{ atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.Add(1)
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TestPromise06_OneEmitter runs two Subscribers. Then it begins another term behind the back of the one that leads, as
// a new leader would, and lets the handlers of the first finish.
func TestPromise06_OneEmitter(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	cfg := pgoutbox.SubscriberConfig{Shards: 4, SaveInterval: 10 * time.Millisecond}
	finish := make(chan struct{})
	causes := make(chan error, 100)
	handle := func(msg *message.Message, row pgoutbox.Row) bool {
		switch {
		case row.Attempt == 1 && row.Term == 1 && msg.UUID == "finished late":
			<-finish
		case row.Attempt == 1 && row.Term == 1 && msg.UUID == "not finished":
			<-msg.Context().Done()
			causes <- context.Cause(msg.Context())
		}
		return true
	}
	db.read("first", got, cfg, handle)
	db.read("second", got, cfg, handle)
	uuids := db.Put(30, 10)
	got.until(uuids...)
	leads := map[int]string{}
	for _, d := range got.All() {
		if other, ok := leads[d.Shard]; ok && other != d.Reader {
			t.Fatalf("shard %d was emitted by both", d.Shard)
		}
		leads[d.Shard] = d.Reader
	}
	locks := db.Text(`
		SELECT count(*) || ' locks, of ' || count(DISTINCT (classid, objid)) || ' shards' FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	if locks != "4 locks, of 4 shards" {
		t.Errorf("the readers hold %s", locks)
	}
	for uuid, n := range got.Times() {
		if n != 1 {
			t.Errorf("%s came %d times", uuid, n)
		}
	}

	for _, uuid := range []string{"finished late", "not finished"} {
		db.publish(nil, uuid, uuid)
	}
	got.until("finished late", "not finished")
	db.Exec("UPDATE outbox_cursors SET term = 7")
	close(finish)
	if cause := outboxtest.Next(t, "the context of a handler ends", causes); !errors.Is(cause, pgoutbox.ErrLeadershipLost) {
		t.Errorf("the context ended with %v", cause)
	}
	got.wait(outboxtest.Patience, "what a stale term acked comes again", func(all []outboxtest.Delivery) bool {
		terms := map[string]int64{}
		for _, d := range all {
			terms[d.UUID] = d.Term
		}
		return terms["finished late"] > 7 && terms["not finished"] > 7
	})
}

// TestPromise09_CostIsFlat asks the server how many pages it looked at for a reader, with a thousand rows in the table and with
// two hundred thousand.
func TestPromise09_CostIsFlat(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf, Settings: map[string]string{
		"shared_preload_libraries": "pg_stat_statements", "autovacuum": "off",
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	small, large := cost(t, server, 1_000), cost(t, server, 200_000)
	t.Logf("1,000 rows: %+v", small)
	t.Logf("200,000 rows: %+v", large)
	// A larger index may be a level deeper: one page for each look into it, and a statement looks into few.
	if large.idle > small.idle*1.05 {
		t.Errorf("a tick looks at %.2f pages beside 200,000 rows and at %.2f beside 1,000", large.idle, small.idle)
	}
	if large.consumed > small.consumed+4 {
		t.Errorf("a new row costs %.1f pages behind 200,000 rows that were read, and %.1f behind 1,000", large.consumed, small.consumed)
	}
	if large.backlog > small.backlog+20 {
		t.Errorf("the first rows of a backlog of 200,000 cost %.0f pages, those of 1,000 cost %.0f", large.backlog, small.backlog)
	}
}

// pages that the server looked at: for one tick, for one new row behind rows that were read, for the first rows of a backlog.
type pages struct{ idle, consumed, backlog float64 }

func cost(t *testing.T, server *pgserver.Server, rows int) (p pages) {
	t.Helper()
	db := openOutbox(t, server.Database(t))
	db.Exec("CREATE EXTENSION pg_stat_statements")
	db.Exec("INSERT INTO outbox (topic, key, payload) SELECT 'orders', i::text, 'x' FROM generate_series(1, $1::int) AS i", rows)
	db.Exec("VACUUM ANALYZE outbox") // hint bits, whose setting would be counted
	got := newLog(t)
	r := db.read("new group", got, pgoutbox.SubscriberConfig{StartFrom: pgoutbox.Latest}, ack)
	db.publish(nil, "", "warm")
	got.until("warm")

	const ticks = "query LIKE '%pg_current_snapshot%' OR query LIKE '%last_value%' OR query LIKE '%pg_is_in_recovery%'"
	before, calls := db.pages(ticks)
	db.waitForCalls(ticks, calls+400)
	after, more := db.pages(ticks)
	p.idle = (after - before) / (more - calls) * 4 // statements of a tick

	const reads = "query LIKE '%\"outbox\"%' AND query LIKE '%payload%' AND query NOT LIKE '%INSERT%'"
	before, _ = db.pages(reads)
	const probes = 20
	for i := range probes {
		uuid := fmt.Sprintf("probe %d", i)
		db.publish(nil, "", uuid)
		got.until(uuid)
	}
	after, _ = db.pages(reads)
	if after == before {
		t.Fatal("no statement that reads rows was found")
	}
	p.consumed = (after - before) / probes
	r.end()

	db.Exec("DELETE FROM outbox_cursors")
	db.Exec("DELETE FROM outbox_consumers")
	held := make(chan struct{})
	before, _ = db.pages(reads)
	first := newLog(t)
	db.read("backlog", first, pgoutbox.SubscriberConfig{Shards: 1, MaxInFlight: 100, Window: 100}, func(msg *message.Message, _ pgoutbox.Row) bool {
		select {
		case <-held:
		case <-msg.Context().Done():
		}
		return true
	})
	defer close(held)
	first.wait(outboxtest.Patience, "100 rows come", func(all []outboxtest.Delivery) bool { return len(all) == 100 })
	after, _ = db.pages(reads)
	p.backlog = after - before
	return p
}

// pages returns how many pages statements looked at in this database, and how often they ran.
func (db *outbox) pages(which string) (pages, calls float64) {
	db.Helper()
	err := db.Pool.QueryRow(db.Context(), `
		SELECT coalesce(sum(shared_blks_hit + shared_blks_read), 0)::float8, coalesce(sum(calls), 0)::float8
		FROM pg_stat_statements
		WHERE dbid = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND query NOT LIKE '%pg_stat_statements%' AND (`+which+`)`).Scan(&pages, &calls)
	db.Must(err)
	return pages, calls
}

func (db *outbox) waitForCalls(which string, n float64) {
	db.Helper()
	again := time.NewTicker(50 * time.Millisecond)
	defer again.Stop()
	late := time.After(outboxtest.Patience)
	for {
		if _, calls := db.pages(which); calls >= n {
			return
		}
		select {
		case <-again.C:
		case <-late:
			db.Fatal("the reader does not poll")
		}
	}
}

// TestPromise10_NothingHeldWhileUserCodeRuns looks at the server from inside a handler, through the only connection that the
// pool has.
func TestPromise10_NothingHeldWhileUserCodeRuns(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	db.Pool = pgserver.Pool(t, db.DSN, func(c *pgxpool.Config) { c.MaxConns = 1 })
	found := make(chan string, 1)
	db.read("reader", got, pgoutbox.SubscriberConfig{Shards: 4}, func(msg *message.Message, _ pgoutbox.Row) bool {
		found <- db.held(msg.Context())
		return true
	})
	db.publish(nil, "", "message")
	if held := outboxtest.Next(t, "a handler has looked", found); held != "" {
		t.Error("while a handler runs: " + held)
	}
}

// held says what the library holds now, "" when that is its advisory locks.
func (db *outbox) held(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, outboxtest.Patience/2)
	defer cancel()
	conn, err := db.Pool.Acquire(ctx)
	if err != nil {
		return "no connection can be had: " + err.Error()
	}
	defer conn.Release()
	// What is held is there whenever one looks; a tick, which takes less than a millisecond, is not.
	held := ""
	for range 50 {
		var inTransaction, otherLocks, locks int
		err = conn.QueryRow(ctx, `
			SELECT count(*) FILTER (WHERE a.xact_start IS NOT NULL),
				count(*) FILTER (WHERE l.locktype <> 'advisory'),
				count(*) FILTER (WHERE l.locktype = 'advisory' AND l.granted)
			FROM pg_stat_activity AS a LEFT JOIN pg_locks AS l USING (pid)
			WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()`).Scan(&inTransaction, &otherLocks, &locks)
		switch {
		case err != nil:
			return err.Error()
		case inTransaction > 0:
			held = "a session is in a transaction"
		case otherLocks > 0:
			held = fmt.Sprintf("%d locks are held that are not advisory locks", otherLocks)
		case locks != 4:
			held = fmt.Sprintf("%d advisory locks are held for 4 shards", locks)
		default:
			return ""
		}
	}
	return held
}
