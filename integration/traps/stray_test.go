package traps

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// copyIn is what an owner does who restores rows: COPY takes ids and transaction ids as they are.
func (db *outbox) copyIn(rows ...[]any) {
	db.Helper()
	for i, row := range rows {
		rows[i] = append([]any{"t", "k"}, row...)
	}
	columns := []string{"topic", "key", "uuid", "xid", "id"}
	if _, err := db.Pool.CopyFrom(db.Context(), pgx.Identifier{"outbox"}, columns, pgx.CopyFromRows(rows)); err != nil {
		db.Fatal(err)
	}
}

// xid is a transaction id so far from the next one of this server: -1 is the last one that ended.
func (db *outbox) xid(distance int64) uint64 {
	db.Helper()
	return uint64(db.number("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint") + distance)
}

// probed is how soon a running reader finds ids above the sequence: within 10 s, and what the machine takes.
const probed = 20 * time.Second

// A reader that trusts the sequence never sees an id above it; one that does not, sees the row now and once more when the
// sequence comes by.
func TestIDsAboveTheSequenceAreDeliveredOnce(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.put(db.Pool, "honest 1", "honest 2")
	db.copyIn([]any{"before 1", db.xid(-1), int64(1000)}, []any{"before 2", db.xid(-1), int64(1001)})
	if n := db.number("SELECT count(*) FROM outbox WHERE id > (SELECT last_value FROM outbox_id_seq)"); n != 2 {
		t.Fatalf("%d rows are above the sequence", n)
	}
	r := db.receive(db.Pool, inOrder(), nil)
	r.until("before 1", "before 2") // at acquisition

	db.copyIn([]any{"while running", db.xid(-1), int64(5000)})
	copied := time.Now()
	db.put(db.Pool, "honest 3") // comes at once, although its id is lower
	r.until("while running")
	if took := time.Since(copied); took > probed {
		t.Errorf("an id above the sequence was found after %v", took)
	}
	db.Exec("SELECT setval('outbox_id_seq', 5000)")
	db.put(db.Pool, "honest 4")
	r.exactly("honest 1", "honest 2", "before 1", "before 2", "honest 3", "while running", "honest 4")

	again := inOrder()
	r.close()
	r = db.receive(db.Pool, again, nil)
	r.exactly()
}

// An honest transaction that was open while the mark was raised over its ids loses nothing.
func TestMarkIsRaisedOverAnOpenTransaction(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	r := db.receive(db.Pool, inOrder(), nil)
	r.settle()
	ended := db.xid(-1)
	open := db.Begin()
	db.put(open, "open 1")
	db.copyIn([]any{"stray", ended, int64(100_000)})
	r.until("stray")
	db.put(open, "open 2")
	db.Commit(open)
	r.exactly("stray", "open 1", "open 2")
}

// Rows copied in from an archive carry the transaction ids of another time or another server.
func TestRowsOfAnArchiveAreDeliveredOnce(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	rolledBack := db.Begin()
	db.put(rolledBack, numbered("hole", 10)...) // ids 1 to 10 are free
	if err := rolledBack.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := db.receive(db.Pool, inOrder(), nil)
	r.settle()

	// From the past: every snapshot says that their transaction had ended.
	db.copyIn([]any{"past 1", uint64(3), int64(2000)}, []any{"past 2", uint64(3), int64(2001)})
	r.until("past 1", "past 2")
	r.settle()

	// Of a transaction that is open here: they wait for it, as its own rows do.
	open := db.Begin()
	db.put(open, "own")
	db.copyIn([]any{"same 1", db.openXid(open), int64(3)}, []any{"same 2", db.openXid(open), int64(2002)})
	r.settle()
	db.Commit(open)
	r.until("same 1", "own", "same 2")
	r.settle()

	// From the future: their turn comes with the ids that they bear, wherever their own ids lie.
	future := db.xid(500)
	db.copyIn([]any{"future 1", future, int64(5)}, []any{"future 2", future, int64(2003)})
	r.settle()
	for _, d := range r.All() {
		if d.UUID == "future 1" || d.UUID == "future 2" {
			t.Fatalf("%s came although its transaction id proves nothing yet", d.UUID)
		}
	}
	db.Exec("DO $$ BEGIN FOR i IN 1..510 LOOP PERFORM pg_current_xact_id(); COMMIT; END LOOP; END $$")
	r.exactly("past 1", "past 2", "same 1", "own", "same 2", "future 1", "future 2")
	r.close()
	r = db.receive(db.Pool, inOrder(), nil)
	r.exactly()
}

func (db *outbox) openXid(tx pgx.Tx) (xid uint64) {
	db.Helper()
	if err := tx.QueryRow(db.Context(), "SELECT pg_current_xact_id()").Scan(&xid); err != nil {
		db.Fatal(err)
	}
	return xid
}
