//go:build unix

package faults

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// A lock that is held is never asked for again: session locks stack, and one unlock would not free them. The session stays
// open throughout, so only unlocks can have freed what is free at the end.
func TestLocksDoNotStack(t *testing.T) {
	t.Parallel()
	const shards = 5
	db := newOutbox(t)
	r := db.subscriber(pgoutbox.SubscriberConfig{Shards: shards, RetryInterval: 1})
	for n := range 50 {
		ctx, cancel := context.WithCancel(context.Background())
		var ends []<-chan struct{}
		for range 1 + n%2 { // two of one topic take turns on one session
			ended, err := r.read(ctx)
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, ended)
		}
		db.AwaitLocks(shards)
		cancel()
		for _, ended := range ends {
			outboxtest.Next(db, "a subscription ends", ended)
		}
		if held := outboxtest.Ask[int](db.Outbox, locks); held != 0 {
			t.Fatalf("%d locks are held after %d subscriptions have ended", held, n+1)
		}
	}
	if n := outboxtest.Ask[int](db.Outbox, sessions); n != 1 || strings.Contains(r.log.String(), "ended") {
		t.Errorf("%d sessions, and the log says\n%s", n, r.log)
	}
}

// After each of many losses every shard is locked once, by one session.
func TestLossesLeaveNoLocks(t *testing.T) {
	t.Parallel()
	const shards = 5
	db := newOutbox(t)
	cfg := pgoutbox.SubscriberConfig{Shards: shards, RetryInterval: 1}
	db.subscriber(cfg).mustRead()
	db.AwaitLocks(shards)
	db.subscriber(cfg).mustRead()
	for range 20 {
		before := outboxtest.Ask[int64](db.Outbox, terms)
		db.Exec("SELECT pg_terminate_backend(pid) FROM (SELECT DISTINCT pid FROM pg_locks WHERE " + outboxtest.IsAdvisoryLock + ") AS leaders")
		db.Eventually("every shard has another term", "SELECT sum(term) >= $1 FROM outbox_cursors", before+shards)
		if n := outboxtest.Ask[int](db.Outbox, locks); n != shards {
			t.Errorf("%d locks are held", n)
		}
	}
}

// The numbers of the locks are made of everything that tells two leads apart: neither tables, nor groups, nor LockBaseIDs of one
// database meet.
func TestNumbersOfLocksDoNotMeet(t *testing.T) {
	t.Parallel()
	const shards = 4
	db := newOutbox(t)
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{Table: "other"}); err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, cfg := range []pgoutbox.SubscriberConfig{
		{},
		{Table: "other"},
		{ConsumerGroup: "another"},
		{LockBaseID: 1}, // the same shards as the first, which nobody should do; here it shows that the number differs
		{LockBaseID: 2},
	} {
		cfg.Shards = shards
		db.subscriber(cfg).mustRead()
		want += shards
		db.AwaitLocks(want)
	}
	if n := outboxtest.Ask[int](db.Outbox, "SELECT count(DISTINCT (classid, objid))::int FROM pg_locks WHERE "+outboxtest.IsAdvisoryLock); n != want {
		t.Errorf("%d numbers for %d locks", n, want)
	}
	db.AwaitSessions(want / shards)
}

// An unlock that answers "you did not hold it" means that nothing the session believes is certain: it is closed.
func TestUnlockOfALostLockClosesTheSession(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	// What somebody's hook or a pooler's reset query could do, in a statement that runs every now and then.
	db.Exec("CREATE TABLE switch AS SELECT false AS flipped")
	p.Set(ToServer, replace(markQuery, markQuery+" WHERE CASE WHEN (SELECT flipped FROM switch) THEN (SELECT count(pg_advisory_unlock_all()) > 0) ELSE true END"))
	r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 2, LockConn: db.dsnOf(p)})
	ctx, cancel := context.WithCancel(t.Context())
	ended, err := r.read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	db.AwaitLocks(2)
	before := db.leader()
	db.Exec("UPDATE switch SET flipped = true")
	db.AwaitLocks(0)
	db.Exec("UPDATE switch SET flipped = false")
	cancel()
	outboxtest.Next(db, "the subscription ends", ended)
	db.Eventually("the session is closed", "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)", before)
	if !strings.Contains(r.log.String(), "was gone") {
		t.Error("nobody says why")
	}
}

// markQuery is in every tick.
const markQuery = `FROM "public"."outbox_id_seq"`

// The fence: between the proof of life and the save of the same round trip somebody resets the session. The save changes
// nothing, and the lead is lost.
func TestSessionThatIsResetSavesNothing(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	db.Exec("CREATE TABLE switch AS SELECT false AS flipped")
	var saves atomic.Int64
	change := replace(markQuery, markQuery+" WHERE CASE WHEN (SELECT flipped FROM switch) THEN set_config('pgoutbox.session', 'reset', false) = 'reset' ELSE true END")
	p.Set(ToServer, func(m Message) ([]byte, bool) {
		if m.Type() == 'B' && bytes.Contains(m, []byte("{\"")) {
			saves.Add(1)
		}
		return change(m)
	})
	r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 1, LockConn: db.dsnOf(p), RetryInterval: outboxtest.Patience}) // it will not come back
	r.mustRead()
	db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'held')")
	held := outboxtest.Next(db, "the row", r.held)
	db.Eventually("its delivery is saved", "SELECT pending <> '{}' FROM outbox_cursors")
	const last = "SELECT max(n) FROM cursor_log"
	db.Exec("UPDATE switch SET flipped = true")
	states, sent := outboxtest.Ask[int64](db.Outbox, last), saves.Load()
	held.Ack() // and now the position wants to be saved
	outboxtest.Next(db, "the message ends", held.Context().Done())
	db.Eventually("the session is closed", "SELECT ("+sessions+") = 0")
	if now := outboxtest.Ask[int64](db.Outbox, last); now != states {
		t.Errorf("a session that was reset saved %d times", now-states)
	}
	t.Logf("%d saves were sent after the reset", saves.Load()-sent)
}

// A lock session that is not ours any more is told by the next poll, whatever was reset.
func TestResetSessionIsLost(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"pgoutbox.session", "idle_session_timeout"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			p := db.proxy()
			db.Exec("CREATE TABLE switch AS SELECT false AS flipped")
			p.Set(ToServer, replace(markQuery, markQuery+" WHERE CASE WHEN (SELECT flipped FROM switch) THEN set_config('"+name+"', '0', false) = '0' ELSE true END"))
			r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 1, LockConn: db.dsnOf(p)})
			r.mustRead()
			db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'held')")
			held := outboxtest.Next(db, "the row", r.held)
			db.Exec("UPDATE switch SET flipped = true")
			outboxtest.Next(db, "the message ends", held.Context().Done())
			if cause := context.Cause(held.Context()); !errors.Is(cause, pgoutbox.ErrLeadershipLost) {
				t.Errorf("it ended with %v", cause)
			}
			db.Exec("UPDATE switch SET flipped = false")
			again := outboxtest.Next(db, "the row again", r.held)
			if row, _ := pgoutbox.RowFromContext(again.Context()); row.Term < 2 {
				t.Errorf("it came again in term %d", row.Term)
			}
		})
	}
}
