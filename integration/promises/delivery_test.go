package promises

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// TestPromise01_NoLoss draws the lowest ids in transactions that commit last, after everything with a higher id was read: one
// while a reader runs, one after its session was cut, as in a crash, with a message in a handler.
func TestPromise01_NoLoss(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	late, later := db.begin(db.DSN), db.begin(db.DSN)
	db.publish(late, "late", "committed late")
	db.publish(later, "later", "committed after a crash")
	var xid string
	db.Must(later.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text").Scan(&xid))
	held := make(chan struct{})
	defer close(held)
	db.read("reader", got, pgoutbox.SubscriberConfig{Shards: 1}, func(msg *message.Message, row pgoutbox.Row) bool {
		if msg.UUID == "in a handler" && row.Term == 1 {
			select {
			case <-held:
			case <-msg.Context().Done():
			}
		}
		return true
	})

	got.until(db.Put(20, 2)...)
	db.Must(late.Commit(t.Context()))
	got.until("committed late")
	db.publish(nil, "held", "in a handler")
	db.publish(nil, "", "behind it")
	got.until("in a handler", "behind it")

	db.Eventually("the position that is stored is past the open transaction, and has one row un-acked", `
		SELECT cardinality(pending) = 1 AND $1::xid8 IN (SELECT pg_snapshot_xip(coalesce(upto_snapshot, after_snapshot)))
		FROM outbox_cursors`, xid)
	if n := db.EndLockSessions(); n != 1 {
		t.Fatalf("the reader had %d lock sessions", n)
	}
	db.Must(later.Commit(t.Context()))
	db.publish(nil, "", "afterwards")
	got.until("committed after a crash", "afterwards")
	got.wait(outboxtest.Patience, "what was in a handler comes again", func(all []outboxtest.Delivery) bool {
		return slices.ContainsFunc(all, func(d outboxtest.Delivery) bool { return d.UUID == "in a handler" && d.Term > 1 })
	})
}

// TestPromise02_NoGhosts takes messages back in the four ways there are.
func TestPromise02_NoGhosts(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	db.read("reader", got, pgoutbox.SubscriberConfig{}, ack)

	rolledBack := db.begin(db.DSN)
	msg := newMessage(pgoutbox.ContextWithTx(t.Context(), rolledBack), "", "ghost of a rollback")
	db.Must(db.Pub.Publish(outboxtest.Topic, msg)) // finds the transaction in the context
	crashed := db.begin(db.DSN)
	db.publish(crashed, "", "ghost of a crash")
	prepared := db.begin(db.DSN)
	db.publish(prepared, "", "ghost of a prepared transaction")
	_, err := prepared.Exec(t.Context(), "PREPARE TRANSACTION 'promise 2'")
	db.Must(err)
	db.Must(pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		err := pgx.BeginFunc(t.Context(), tx, func(savepoint pgx.Tx) error {
			db.publish(savepoint, "", "ghost of a savepoint")
			return errUndo
		})
		db.publish(tx, "", "committed around a savepoint")
		if errors.Is(err, errUndo) {
			return nil
		}
		return err
	}))
	got.until("committed around a savepoint") // with everything else still undecided

	db.Must(rolledBack.Rollback(t.Context()))
	db.Exec("SELECT pg_terminate_backend($1)", int(crashed.Conn().PgConn().PID()))
	db.Exec("ROLLBACK PREPARED 'promise 2'")
	db.publish(nil, "", "probe")
	got.until("probe")
	for _, d := range got.All() {
		if strings.HasPrefix(d.UUID, "ghost") {
			t.Errorf("%s was delivered", d.UUID)
		}
	}
}

var errUndo = errors.New("undo")

// TestPromise03_OrderPerKey has four writers count up three keys. A transaction gets its id before it waits for the key, so
// neither the order of transactions nor that of commits is the order of the key. Handlers nack one attempt in five, and the
// work is handed over twice, once by a crash.
func TestPromise03_OrderPerKey(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	const keys, writers, each = 3, 4, 40
	db.Exec("CREATE TABLE counters (key text PRIMARY KEY, n int NOT NULL)")
	for k := range keys {
		db.Exec("INSERT INTO counters VALUES ($1, 0)", fmt.Sprint(k))
	}
	nackSome := func(_ *message.Message, row pgoutbox.Row) bool { return row.Attempt > 1 || row.ID%5 != 0 }
	first := db.read("first", got, pgoutbox.SubscriberConfig{Shards: 2}, nackSome)
	db.read("second", got, pgoutbox.SubscriberConfig{}, nackSome)

	var wg sync.WaitGroup
	var all []string
	for k := range keys {
		for n := range writers * each {
			all = append(all, fmt.Sprintf("%d/%d", k, n+1))
		}
	}
	for w := range writers {
		wg.Go(func() {
			for i := range each * keys {
				if err := db.count(fmt.Sprint((i + w) % keys)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	got.wait(outboxtest.Patience, "a third comes", func(all []outboxtest.Delivery) bool { return len(all) > keys*writers*each/3 })
	first.end()
	got.wait(outboxtest.Patience, "two thirds come", func(all []outboxtest.Delivery) bool { return len(all) > keys*writers*each*2/3 })
	db.EndLockSessions()
	wg.Wait()
	got.until(all...)

	last := map[string]int{}
	seen := map[string]bool{}
	readers := map[string]bool{}
	for _, d := range got.All() {
		readers[d.Reader] = true
		if seen[d.UUID] {
			continue
		}
		seen[d.UUID] = true
		var n int
		if _, err := fmt.Sscanf(d.UUID, d.Key+"/%d", &n); err != nil {
			t.Fatalf("%s of key %s: %v", d.UUID, d.Key, err)
		}
		if n != last[d.Key]+1 {
			t.Errorf("key %s: %d came after %d", d.Key, n, last[d.Key])
		}
		last[d.Key] = n
	}
	if len(readers) != 2 {
		t.Errorf("the work was to be handed over; it was done by %v", readers)
	}
}

// count adds 1 to a counter and publishes the new value, in one transaction.
func (db *outbox) count(key string) error {
	ctx := db.Context()
	return pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_current_xact_id()"); err != nil {
			return err
		}
		var n int
		if err := tx.QueryRow(ctx, "UPDATE counters SET n = n + 1 WHERE key = $1 RETURNING n", key).Scan(&n); err != nil {
			return err
		}
		return db.Pub.WithTx(tx).Publish(outboxtest.Topic, newMessage(ctx, key, fmt.Sprintf("%s/%d", key, n)))
	})
}

// TestPromise07_DuplicatesOnlyAfterACrashOrANack restarts readers gracefully while they work. Positions are saved at hand-over
// only, so what hand-over does not save comes twice.
func TestPromise07_DuplicatesOnlyAfterACrashOrANack(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	cfg := pgoutbox.SubscriberConfig{Shards: 4, MaxInFlight: 4, SaveInterval: 1 << 40}
	uuids := db.Put(12, 50)
	for round := range 4 {
		r := db.read(fmt.Sprint("round ", round), got, cfg, ack)
		got.wait(outboxtest.Patience, "a fifth more comes", func(all []outboxtest.Delivery) bool { return len(all) >= (round+1)*len(uuids)/5 })
		r.end()
	}
	db.read("last", got, cfg, ack)
	got.until(uuids...)
	db.publish(nil, "", "probe")
	got.until("probe")
	for uuid, n := range got.Times() {
		if n != 1 {
			t.Errorf("%s came %d times", uuid, n)
		}
	}
}

// TestPromise08_ABadRowBlocksItsOwnKey nacks one row for ever, in the only shard there is.
func TestPromise08_ABadRowBlocksItsOwnKey(t *testing.T) {
	t.Parallel()
	db, got := newOutbox(t), newLog(t)
	db.publish(nil, "bad", "bad/1")
	db.publish(nil, "bad", "bad/2")
	good := db.Put(10, 50)
	db.read("reader", got, pgoutbox.SubscriberConfig{Shards: 1, MaxInFlight: 4}, func(msg *message.Message, _ pgoutbox.Row) bool {
		return msg.UUID != "bad/1"
	})
	got.until(good...)
	db.publish(nil, "good", "good/1")
	got.until("good/1")
	got.wait(outboxtest.Patience, "the bad row is tried ten times", func(all []outboxtest.Delivery) bool {
		n := 0
		for _, d := range all {
			if d.UUID == "bad/1" {
				n++
			}
		}
		return n >= 10
	})
	if got.Times()["bad/2"] != 0 {
		t.Error("a row came before the one of its key that was refused")
	}
}
