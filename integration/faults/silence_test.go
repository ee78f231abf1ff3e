//go:build unix

package faults

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// The shortest times of a lock session whose lease is 2 s.
const (
	lease            = 2 * time.Second
	statementTimeout = 2 * time.Second
)

// A client falls silent at any byte, and nobody tells the server. The locks are free within statement_timeout + Lease all the
// same, and by then the client has stopped trusting its lead.
func TestSilentClientLosesItsLocks(t *testing.T) {
	const shards = 3
	cuts := []struct {
		name string
		torn bool // some messages of a statement have arrived, and not its Sync
		cut  func() Filter
	}{
		{"between two polls", false, func() Filter {
			return func(m Message) ([]byte, bool) {
				if beginsPoll(m) {
					return nil, true
				}
				return m, false
			}
		}},
		{"in the middle of a poll's first message", false, func() Filter {
			return func(m Message) ([]byte, bool) {
				if beginsPoll(m) {
					return m[:len(m)/2], true
				}
				return m, false
			}
		}},
		{"after a poll's first statement", false, func() Filter { return inPoll(statement, 0) }},
		{"in the middle of a poll's second statement", false, func() Filter { return inPoll(statement, 1) }},
		{"between the messages of a poll's first statement", true, func() Filter { return after('B', 1) }},
		{"between the messages of a poll's third statement", true, func() Filter { return after('B', 3) }},
		{"before the end of a poll's first statement", true, func() Filter { return after('E', 1) }},
		{"in the middle of a save", false, func() Filter {
			return func(m Message) ([]byte, bool) {
				save := m.Type() == 'B' && len(m) > 200
				if save {
					return m[:len(m)/2], true
				}
				return m, false
			}
		}},
		{"between the messages of a save", true, func() Filter {
			return func(m Message) ([]byte, bool) { return m, m.Type() == 'B' && len(m) > 200 }
		}},
	}
	for _, c := range cuts {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			p := db.proxy()
			r := db.subscriber(pgoutbox.SubscriberConfig{Shards: shards, Lease: lease, LockConn: db.dsnOf(p)})
			r.mustRead()
			db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'held')")
			held := outboxtest.Next(db, "the row", r.held)
			db.AwaitLocks(shards)
			stop := db.write(anotherKey) // so that there is always something to save
			defer stop()
			outboxtest.Next(db, "rows", r.got)
			// The first save also prepares its statement; a cut in it would be one between the messages of a statement.
			db.Eventually("a position is stored", "SELECT EXISTS (SELECT FROM outbox_cursors WHERE pending <> '{}')")

			silent := make(chan time.Time, 1)
			cut := c.cut()
			p.Set(ToServer, func(m Message) ([]byte, bool) {
				send, hold := cut(m)
				if hold {
					p.Silence(ToServer) // also what connects now
					p.Silence(ToClient) // what the server says about it
					silent <- time.Now()
				}
				return send, hold
			})
			began := outboxtest.Next(db, "the cut", silent)
			lost := make(chan time.Time, 1)
			unlink := context.AfterFunc(held.Context(), func() { lost <- time.Now() })
			defer unlink()
			distrusted := outboxtest.Next(db, "the message ends", lost).Sub(began)
			if c.torn && outboxtest.Ask[int](db.Outbox, "SELECT current_setting('server_version_num')::int") < 170000 {
				// Not idle, and no timeout of these versions looks at a statement that is still being sent: only the end of the
				// connection ends it. Without a proxy the keep-alives notice within the lease that the client's host is gone.
				db.Eventually("the server waits for the rest", "SELECT count(*) = 1 FROM pg_stat_activity WHERE pid = ANY (("+leaders+")::int[]) AND state = 'active' AND wait_event = 'ClientRead'")
				p.Cut()
				began = time.Now()
			}
			free := db.AwaitLocks(0).Sub(began)
			t.Logf("the client stopped trusting its lead after %v, the locks were free %v after the cut", ms(distrusted), ms(free))
			if !errors.Is(context.Cause(held.Context()), pgoutbox.ErrLeadershipLost) {
				t.Errorf("the message ended with %v", context.Cause(held.Context()))
			}
			if distrusted > free+slack/4 && !c.torn { // what is emitted asks the clock, not the context, which a busy machine ends late
				t.Error("the client trusted its lead when the locks were free")
			}
			if free > lease+statementTimeout+slack {
				t.Errorf("the locks were free after %v", free)
			}
		})
	}
}

// statement is how many messages a prepared statement takes: Bind, Describe, Execute and a Sync of its own.
const statement = 4

// beginsPoll reports whether it is the first message of a poll: the filter may be set in the middle of one.
func beginsPoll(m Message) bool {
	return m.Type() == 'B' && bytes.HasPrefix(m.Body(), []byte("\x00pgoutbox_1\x00"))
}

// inPoll passes so many messages of a poll, half of the next one if there is to be one, and holds the rest.
func inPoll(whole, half int) Filter {
	n := 0
	return func(m Message) ([]byte, bool) {
		if n == 0 && !beginsPoll(m) {
			return m, false
		}
		if n++; n > whole {
			return m[:len(m)/2], true
		}
		return m, n == whole && half == 0
	}
}

// after holds what follows the n-th message of a type.
func after(typ byte, n int) Filter {
	return func(m Message) ([]byte, bool) {
		if m.Type() == typ {
			n--
		}
		return m, n == 0
	}
}

// The server falls silent: the client stops trusting its lead before the server frees the locks, and leads again when the wire
// is mended.
func TestSilentServerIsNotTrusted(t *testing.T) {
	db := newOutbox(t)
	p := db.proxy()
	r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 3, Lease: lease, LockConn: db.dsnOf(p)})
	r.mustRead()
	hold := func() *message.Message {
		db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('orders', 'hold', 'held')")
		return outboxtest.Next(db, "the row", r.held)
	}
	held := hold()
	began := time.Now()
	p.Silence(ToClient)
	outboxtest.Next(db, "the message ends", held.Context().Done())
	distrusted := time.Since(began)
	t.Logf("the client stopped trusting its lead after %v", ms(distrusted))
	if distrusted > lease+slack/4 {
		t.Errorf("the client trusted a silent server for %v", distrusted)
	}
	if !errors.Is(context.Cause(held.Context()), pgoutbox.ErrLeadershipLost) {
		t.Errorf("the message ended with %v", context.Cause(held.Context()))
	}
	p.Cut()
	p.Pass(ToClient)
	again := outboxtest.Next(db, "the row again", r.held)
	if a, _ := pgoutbox.RowFromContext(again.Context()); a.Term != 2 || !bytes.Equal(again.Payload, held.Payload) {
		t.Errorf("it came again in term %d", a.Term)
	}
	t.Logf("it led again after %v", ms(time.Since(began)))
	db.cursorsNeverWentBack()
}
