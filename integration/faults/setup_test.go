//go:build unix

package faults

import (
	"bytes"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// replace changes a text in every message of a client.
func replace(before, after string) Filter {
	return func(m Message) ([]byte, bool) {
		if m.Type() == 0 || !bytes.Contains(m, []byte(before)) {
			return m, false
		}
		return m.With(bytes.ReplaceAll(m.Body(), []byte(before), []byte(after))), false
	}
}

// A lock is asked for only when the settings that will free it are known to be in effect.
func TestNoLockWithoutItsSettings(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		filter Filter
		says   string
	}{
		// As after a batch that was rolled back, or with a pooler that hands each transaction to another server process.
		{"they are gone in the next statement", replace("SELECT set_config($1, $2, false)", "SELECT set_config($1, $2, true)"), "gone in the next statement"},
		{"the lease is refused", replace("idle_session_timeout", "idle_session_timeouX"), "idle_session_timeout"},
		{"the lease is another", replace("idle_session_timeout\x00\x00\x00\x042000", "idle_session_timeout\x00\x00\x00\x049000"), "gone in the next statement"},
		{"statement_timeout is refused", replace("statement_timeout", "statement_timeouX"), "statement_timeout"},
		{"lock_timeout is refused", replace("lock_timeout", "lock_timeouX"), "lock_timeout"},
		{"row_security is refused", replace("row_security", "row_securitX"), "row_security"},
		{"synchronous_commit is refused", replace("synchronous_commit\x00\x00\x00\x03off", "synchronous_commiX\x00\x00\x00\x03off"), "synchronous_commit"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			p := db.proxy()
			var tries atomic.Int64
			p.Set(ToServer, func(m Message) ([]byte, bool) {
				if bytes.Contains(m, []byte("pg_try_advisory_lock")) {
					tries.Add(1)
				}
				return test.filter(m)
			})
			r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 3, Lease: lease, RetryInterval: 10 * time.Millisecond, LockConn: db.dsnOf(p)})
			ended, err := r.read(t.Context())
			said := r.log.String()
			if err != nil {
				said = err.Error()
			}
			if !strings.Contains(said, test.says) {
				t.Errorf("nobody says %q, but %s", test.says, said)
			}
			if gone := strings.Contains(test.says, "gone"); gone != errors.Is(err, pgoutbox.ErrPooledConnection) {
				t.Errorf("Subscribe returned %v", err)
			}
			if n := outboxtest.Ask[int](db.Outbox, locks); n != 0 || tries.Load() > 0 {
				t.Errorf("%d locks are held after %d tries", n, tries.Load())
			}
			if err != nil {
				return
			}
			p.Pass(ToServer)
			db.AwaitLocks(3)
			if err := r.sub.Close(); err != nil {
				t.Error(err)
			}
			<-ended
			db.AwaitSessions(0)
		})
	}
}

// What not every server has is no condition.
func TestOptionalSettingsMayBeRefused(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	p.Set(ToServer, func(m Message) ([]byte, bool) {
		for _, name := range []string{"client_connection_check_interval", "tcp_user_timeout", "tcp_keepalives_idle"} {
			send, _ := replace(name, "no_such_setting")(m)
			m = send
		}
		return m, false
	})
	db.subscriber(pgoutbox.SubscriberConfig{Shards: 3, LockConn: db.dsnOf(p)}).mustRead()
	db.AwaitLocks(3)
}

// The connection ends after each message of the first second: nothing is left of any of these sessions, and the next one
// leads.
func TestSetUpThatIsCutLeavesNothing(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	const most = 120
	var n, cut atomic.Int64
	p.Set(ToServer, func(m Message) ([]byte, bool) {
		if n.Add(1) == cut.Load() {
			go p.Cut() // from another goroutine: the proxy waits for this one
			return m[:len(m)/2], false
		}
		return m, false
	})
	cuts := 0
	for at := int64(1); at < most; at += 7 {
		n.Store(0)
		cut.Store(at)
		r := db.subscriber(pgoutbox.SubscriberConfig{Shards: 3, Lease: lease, RetryInterval: 10 * time.Millisecond, LockConn: db.dsnOf(p)})
		ended := r.mustRead()
		db.AwaitLocks(3)
		if n.Load() >= at {
			cuts++
		}
		if err := r.sub.Close(); err != nil {
			t.Error(err)
		}
		<-ended
		db.AwaitLocks(0)
		db.AwaitSessions(0)
	}
	t.Logf("cut %d times", cuts)
}
