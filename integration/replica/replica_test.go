//go:build unix

package replica

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// The standby serves the pages while it is at hand, and what it does, late, conflicting, paused, dead or promoted, costs no row and no
// order, and holds nothing up.
func TestStandbyServesPagesWhileItCan(t *testing.T) {
	p, log := newPair(t, nil), outboxtest.NewLog(t)
	p.subscribe(t, log)
	for i := range 20 {
		p.sink.Until(t, 5*time.Second, p.put("served "+string(rune('a'+i)), 20)...)
	}
	served := p.pages()
	if served < 10 {
		t.Errorf("the standby has served %d pages of about 20", served)
	}

	// Rows of a transaction that ends late are found there too.
	late := p.Begin()
	p.ExecOn(late, "INSERT INTO outbox (topic, uuid) VALUES ('orders', 'late')")
	p.sink.Until(t, 5*time.Second, p.put("meanwhile", 20)...)
	p.Commit(late)
	p.sink.Until(t, 5*time.Second, "late")

	// The log does not arrive.
	replica := &outboxtest.Outbox{TB: t, Pool: p.replica}
	replica.Exec("SELECT pg_wal_replay_pause()")
	began := time.Now()
	p.sink.Until(t, 5*time.Second, p.put("paused", 500)...)
	if took := time.Since(began); took > 2*time.Second {
		t.Errorf("a standby that is late held rows up for %v", took)
	}
	log.Until(t, "the replica is passed over")
	replica.Exec("SELECT pg_wal_replay_resume()")

	// Its processes stand still.
	stopped := outboxtest.Ask[[]int](replica, `SELECT array_agg(pid) FROM pg_stat_activity
		WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	for _, pid := range stopped {
		p.Must(syscall.Kill(pid, syscall.SIGSTOP))
	}
	began = time.Now()
	p.sink.Until(t, 5*time.Second, p.put("silent", 500)...)
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("a standby that is silent held rows up for %v", took)
	}
	for _, pid := range stopped {
		p.Must(syscall.Kill(pid, syscall.SIGCONT))
	}

	// It cancels what it is asked: rows are removed under it.
	for range 10 {
		p.sink.Until(t, 5*time.Second, p.put("conflict "+time.Now().Format(time.RFC3339Nano), 100)...)
		p.Exec("DELETE FROM outbox WHERE uuid LIKE 'served%'")
		p.Exec("VACUUM outbox")
	}
	p.promote(t)
	p.mustHaveComeOnce(t)
}

// promote has the standby become a primary of its own, while rows come. What is written there is no row of ours.
func (p *pair) promote(t *testing.T) {
	t.Helper()
	replica := &outboxtest.Outbox{TB: t, Pool: p.replica}
	before := p.put("before the promotion", 100)
	replica.Exec("SELECT pg_promote()")
	// The same ids, and transaction ids that the primary's snapshots count as ended: its sequence and its counter stand where they stood.
	replica.Exec("INSERT INTO outbox (topic, uuid) SELECT 'orders', 'a ghost' FROM generate_series(1, 50)")
	p.sink.Until(t, 5*time.Second, append(before, p.put("after the promotion", 500)...)...)
	if n := p.sink.Times()["a ghost"]; n > 0 {
		t.Errorf("%d rows of the promoted standby were delivered", n)
	}
}

// A standby is promoted in the middle of a batch, and somebody empties the copy. What it was to serve comes from the primary.
func TestCopyThatIsEmptiedLosesNothing(t *testing.T) {
	p, log := newPair(t, nil), outboxtest.NewLog(t)
	sub, err := pgoutbox.NewSubscriber(p.Pool, pgoutbox.SubscriberConfig{
		ConsumerGroup: "group", Shards: 1, Window: 1000, ReadPool: p.replica, PollInterval: 20 * time.Millisecond,
	}, log)
	p.Must(err)
	uuids := p.put("row", 20_000)
	messages, err := sub.Subscribe(t.Context(), pgoutbox.AllTopics)
	p.Must(err)
	first := outboxtest.Next(t, "a row", messages) // nothing is acked, so the log stands still
	outboxtest.Eventually(t, 5*time.Second, "the standby serves", func() (bool, string) { return p.pages() > 0, "" })
	replica := &outboxtest.Outbox{TB: t, Pool: p.replica}
	replica.Exec("SELECT pg_promote()")
	replica.Exec("TRUNCATE outbox")
	p.sink.Add(outboxtest.Received("reader", first))
	first.Ack()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for msg := range messages {
			p.sink.Add(outboxtest.Received("reader", msg))
			msg.Ack()
		}
	}()
	p.sink.Until(t, 20*time.Second, uuids...)
	log.Until(t, "it is not a standby")
	p.Must(sub.Close())
	<-done
	p.mustHaveComeOnce(t)
}

// Who takes over has a tick that is older than what the leader before has stored. A standby that is as far as that tick lacks the rows that
// are pending.
func TestPendingRowsOfTheLeaderBeforeAreNotMissed(t *testing.T) {
	p := newPair(t, nil)
	subscriber := func() (*pgoutbox.Subscriber, <-chan *message.Message) {
		sub, err := pgoutbox.NewSubscriber(p.Pool, pgoutbox.SubscriberConfig{
			ConsumerGroup: "group", Shards: 1, ReadPool: p.replica, Lease: 2 * time.Second,
			RetryInterval: 20 * time.Millisecond, PollInterval: 20 * time.Millisecond, SaveInterval: 20 * time.Millisecond, CloseTimeout: 10 * time.Millisecond,
		}, outboxtest.NewLog(t))
		p.Must(err)
		messages, err := sub.Subscribe(t.Context(), pgoutbox.AllTopics)
		p.Must(err)
		return sub, messages
	}
	replica := &outboxtest.Outbox{TB: t, Pool: p.replica}
	leader, messages := subscriber()
	p.AwaitLocks(1)
	var standby *pgoutbox.Subscriber
	for round := range outboxtest.Rounds(50) {
		var next <-chan *message.Message
		standby, next = subscriber()
		outboxtest.Pause(t.Context(), 600*time.Millisecond) // for a tick, which it makes each quarter of the lease
		replica.Exec("SELECT pg_wal_replay_pause()")
		uuid := p.put(fmt.Sprintf("round %d", round), 1)[0]
		held := outboxtest.Next(t, "the row", messages)
		p.Eventually("it is pending", "SELECT count(*) = 1 FROM outbox_cursors WHERE cardinality(pending) = 1")
		if n := outboxtest.Ask[int](replica, "SELECT count(*)::int FROM outbox WHERE uuid = $1", uuid); n > 0 {
			t.Fatal("the trap is none: the standby has the row")
		}
		p.Must(leader.Close())
		held.Nack()
		again := outboxtest.Next(t, "the row again", next)
		if again.UUID != uuid {
			t.Errorf("%s came instead of %s", again.UUID, uuid)
		}
		again.Ack()
		replica.Exec("SELECT pg_wal_replay_resume()")
		leader, messages = standby, next
	}
	p.Must(standby.Close())
}

// A standby that is down is of no importance, and one that comes back serves again.
func TestStandbyThatIsDownIsPassedOver(t *testing.T) {
	p, log := newPair(t, nil), outboxtest.NewLog(t)
	p.Must(p.standby.Stop(t.Context(), "immediate"))
	p.subscribe(t, log)
	p.sink.Until(t, 5*time.Second, p.put("down", 100)...)
	p.Must(p.standby.StartAgain(t.Context()))
	p.replica.Reset()
	before := p.pages()
	outboxtest.Eventually(t, 20*time.Second, "the standby serves", func() (bool, string) {
		p.sink.Until(t, 5*time.Second, p.put("up "+time.Now().Format(time.RFC3339Nano), 5)...)
		return p.pages() > before, ""
	})
	p.mustHaveComeOnce(t)
}

// Another server, or another database of the same one, is not a replica.
func TestReadPoolOfAnotherDatabaseIsRefused(t *testing.T) {
	db := outboxtest.New(t)
	other := outboxtest.New(t)
	p := newPair(t, nil)
	for what, pool := range map[string]*outboxtest.Outbox{"another database": other, "another server": {TB: t, Pool: p.replica}} {
		sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group", ReadPool: pool.Pool}, nil)
		db.Must(err)
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err = sub.Subscribe(ctx, "t")
		cancel()
		if err == nil || !strings.Contains(err.Error(), "ReadPool leads to another database") {
			t.Errorf("%s: Subscribe returned %v", what, err)
		}
		db.Must(sub.Close())
	}
	// The primary itself is no standby, and serves as the pool does.
	sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group", ReadPool: pgserver.Pool(t, db.DSN)}, nil)
	db.Must(err)
	messages, err := sub.Subscribe(t.Context(), "orders")
	db.Must(err)
	db.Exec("INSERT INTO outbox (topic, uuid) VALUES ('orders', 'row')")
	outboxtest.Next(t, "the row", messages).Ack()
	db.Must(sub.Close())
}
