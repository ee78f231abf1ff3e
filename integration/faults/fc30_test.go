//go:build unix

package faults

import (
	"bytes"
	"context"
	"sync"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-30: the server took the locks, and the answer does not come in time. The session that may hold them is closed; one reader leads
// afterwards, and no lock is left that nobody knows of.
func TestFC30_LocksWhoseAnswerIsLateAreGivenUp(t *testing.T) {
	t.Parallel()
	const shards = 3
	db := newOutbox(t)
	for round := range outboxtest.Rounds(50) {
		p := db.proxy()
		cfg := pgoutbox.SubscriberConfig{Shards: shards, RetryInterval: 50 * time.Millisecond}
		first := cfg
		first.LockConn = db.dsnOf(p)
		var once sync.Once
		taken := make(chan struct{}, 1)
		p.Set(ToServer, func(m Message) ([]byte, bool) {
			if bytes.Contains(m, []byte("pg_try_advisory_lock")) {
				once.Do(func() {
					p.Silence(ToClient)
					taken <- struct{}{}
				})
			}
			return m, false
		})
		a, b := db.subscriber(first), db.subscriber(cfg)
		endedA := make(chan (<-chan struct{}), 1)
		go func() { // it may take until the silence is over
			ended, err := a.read(context.WithoutCancel(t.Context()))
			if err != nil {
				db.Error(err)
			}
			endedA <- ended
		}()
		outboxtest.Next(t, "a try for the locks", taken)
		db.AwaitLocks(shards) // by a session that hears nothing
		endedB := b.mustRead()
		db.Eventually("the session that hears nothing is given up", "SELECT count(*) > 0 FROM outbox_cursors WHERE term > 0")
		p.Pass(ToClient)
		db.Exec("INSERT INTO outbox (topic, uuid) VALUES ('orders', 'row ' || $1::int)", round)
		select { // exactly one has it
		case <-a.got:
		case <-b.got:
		case <-time.After(outboxtest.Patience):
			t.Fatal("nobody emits")
		}
		db.AwaitLocks(shards)
		if n := len(db.LockSessions()); n != 1 {
			t.Errorf("%d sessions hold locks", n)
		}
		db.Must(a.sub.Close())
		db.Must(b.sub.Close())
		<-endedB
		<-(<-endedA)
		db.AwaitLocks(0)
		p.Close()
	}
}
