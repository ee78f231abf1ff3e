package promises

import (
	"fmt"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// TestServerThatCrashesIsReadAgain crashes the server with messages in handlers. The channel stays open, and delivery goes on by
// itself: nothing is lost, and again comes what was un-acked or acked since the last save.
func TestServerThatCrashesIsReadAgain(t *testing.T) {
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local") // one that can be crashed
	server, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	db, got := openOutbox(t, server.Database(t)), newLog(t)
	uuids := db.Put(20, 100)
	db.read("reader", got, pgoutbox.SubscriberConfig{Shards: 1, MaxInFlight: 4}, func(msg *message.Message, _ pgoutbox.Row) bool {
		work := time.NewTimer(10 * time.Millisecond)
		defer work.Stop()
		select {
		case <-work.C:
		case <-msg.Context().Done():
		}
		return true
	})
	got.wait(outboxtest.Patience, "half of it comes", func(all []outboxtest.Delivery) bool { return len(all) > len(uuids)/2 })
	crash := time.Now()
	db.Must(server.Stop(t.Context(), "immediate"))
	before := len(got.All())
	db.Must(server.StartAgain(t.Context()))
	up := time.Now()
	got.wait(outboxtest.Patience, "it goes on", func(all []outboxtest.Delivery) bool { return len(all) > before })
	t.Logf("the first message came %s after the server accepted connections again", time.Since(up).Round(10*time.Millisecond))
	got.until(uuids...)

	first := map[string]time.Time{}
	again := 0
	for _, d := range got.All() {
		at, seen := first[d.UUID]
		if !seen {
			first[d.UUID] = d.At
			continue
		}
		again++
		// Saves are 100 ms apart, and asynchronous: a crash of the server takes back what it had not flushed, 0.6 s by default.
		if age := crash.Sub(at); age > 2*time.Second {
			t.Errorf("%s was delivered %s before the crash, and came again", d.UUID, age)
		}
	}
	t.Logf("%d of %d came again", again, len(uuids))
}

// TestSlowConsumerDelaysNobodyElse has one group whose handlers hang, in its own process with its own small window.
func TestSlowConsumerDelaysNobodyElse(t *testing.T) {
	t.Parallel()
	db, slow, quick := newOutbox(t), newLog(t), newLog(t)
	release := make(chan struct{})
	const inFlight, window = 5, 50
	db.Pool = pgserver.Pool(t, db.DSN, func(c *pgxpool.Config) { c.MaxConns = 2 })
	db.group("slow", slow, pgoutbox.SubscriberConfig{Shards: 1, MaxInFlight: inFlight, Window: window}, func(*message.Message, pgoutbox.Row) bool {
		<-release
		return true
	})
	defer func() { close(release) }()
	db.group("quick", quick, pgoutbox.SubscriberConfig{Shards: 1}, ack)
	uuids := db.Put(100, 10)
	slow.wait(outboxtest.Patience, "the slow one is busy", func(all []outboxtest.Delivery) bool { return len(all) == inFlight })
	quick.until(uuids...)
	for i := range 3 {
		uuid := fmt.Sprint("probe ", i)
		db.publish(nil, "", uuid)
		quick.within(2*time.Second, uuid)
	}
	if n := len(slow.All()); n != inFlight {
		t.Errorf("the slow group got %d messages, not %d", n, inFlight)
	}
	for range inFlight {
		release <- struct{}{}
	}
	slow.wait(outboxtest.Patience, "it goes on where it was", func(all []outboxtest.Delivery) bool { return len(all) == 2*inFlight })
}
