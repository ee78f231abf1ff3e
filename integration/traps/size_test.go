package traps

import (
	"bytes"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

const megabyte = 1 << 20

// One row may be larger than any bound on memory: it still passes, in the order of its key.
func TestHugeRowPasses(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	payloads := make(chan []byte, 1)
	r := db.receive(db.Pool, inOrder(), func(d outboxtest.Delivery) bool {
		if d.UUID == "huge" {
			payloads <- d.Message.Payload
		}
		return true
	})
	db.put(db.Pool, "before")
	db.Exec("INSERT INTO outbox (topic, key, uuid, payload) VALUES ('t', 'k', 'huge', convert_to(repeat('0123456789abcdef', $1 / 16), 'UTF8'))",
		20*megabyte)
	db.put(db.Pool, "after")
	r.exactly("before", "huge", "after")
	if want := bytes.Repeat([]byte("0123456789abcdef"), 20*megabyte/16); !bytes.Equal(<-payloads, want) {
		t.Error("the payload arrived changed")
	}
}

// Messages that are out count in bytes too: 40 rows of 1 MB are never out together, although 64 may be.
func TestLargeRowsAreOutByBytes(t *testing.T) {
	t.Parallel()
	const rows, most = 40, 16 // MB
	db := newOutbox(t)
	cfg := inOrder()
	cfg.Ordering, cfg.MaxInFlight = 0, 64
	out := make(chan *message.Message, rows)
	r := db.receive(db.Pool, cfg, func(d outboxtest.Delivery) bool {
		if len(d.Message.Payload) < megabyte {
			return true
		}
		out <- d.Message
		return false
	})
	db.Exec("INSERT INTO outbox (topic, uuid, payload) SELECT 't', 'large ' || i, convert_to(repeat('x', $1), 'UTF8') FROM generate_series(1, $2) AS i",
		megabyte, rows)
	r.settle() // small rows pass them by
	db.ticks(30)
	if n := len(out); n == 0 || n > most {
		t.Fatalf("%d MB are out at once, want at most %d", n, most)
	}
	seen := map[string]bool{}
	for range rows {
		if n := len(out); n > most {
			t.Fatalf("%d MB are out at once, want at most %d", n, most)
		}
		msg := <-out
		seen[msg.UUID] = true
		msg.Ack()
	}
	for _, uuid := range numbered("large", rows) {
		if !seen[uuid] {
			t.Errorf("%s never came", uuid)
		}
	}
	r.settle()
}

// While a message is with its handler, nothing is held: no connection of the pool, no transaction, no lock but the shard's.
func TestNothingIsHeldWhileUserCodeRuns(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	pool, name := db.newPool()
	release := make(chan struct{})
	r := db.receive(pool, inOrder(), func(outboxtest.Delivery) bool {
		<-release
		return true
	})
	db.put(db.Pool, "row 1", "row 2")
	r.until("row 1")
	// Pages come and go meanwhile, for every transaction of the server; what is held would be there each time one looks.
	late := time.After(outboxtest.Patience)
	for pool.Stat().AcquiredConns() > 0 {
		select {
		case <-time.After(time.Millisecond):
		case <-late:
			t.Fatal("a connection of the pool is held")
		}
	}
	db.Eventually("no transaction is held", `
		SELECT count(*) = 0 FROM pg_stat_activity
		WHERE (state LIKE 'idle in transaction%' OR state = 'idle' AND (backend_xid IS NOT NULL OR backend_xmin IS NOT NULL))
			AND (application_name = $1 OR `+outboxtest.IsLockSession+")", name)
	db.Eventually("no lock is held but the shard's", `
		SELECT count(*) = 1 AND bool_and(l.locktype = 'advisory')
		FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
		WHERE application_name = $1 OR `+outboxtest.IsLockSession, name)
	close(release)
	r.exactly("row 1", "row 2")
}
