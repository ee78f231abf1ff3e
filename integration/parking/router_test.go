package parking

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// A handler in a Router says why it failed: with ReportErrors a permanent failure is parked at once and any other after MaxAttempts,
// each with its reason and without what the message holds. While nobody leads, psql asks for them back.
func TestRouterParksWithAReason(t *testing.T) {
	db, log := outboxtest.New(t), outboxtest.NewLog(t)
	var mended atomic.Bool
	var sink outboxtest.Sink
	handle := func(msg *message.Message) error {
		sink.Add(outboxtest.Received("router", msg))
		switch {
		case mended.Load():
			return nil
		case msg.UUID == "a/2":
			return fmt.Errorf("%w: no such customer in %s", pgoutbox.ErrPermanent, msg.Payload)
		case msg.UUID == "b/2":
			return errors.New("busy")
		}
		return nil
	}
	end := route(t, db, log, handle)
	sent := append(keyed(db, "a", 1, 3), keyed(db, "b", 1, 3)...)
	sink.Until(t, outboxtest.Patience, sent...)
	db.Eventually("both are parked", "SELECT count(*) = 2 FROM outbox_parked")
	parked := db.Text(`SELECT string_agg(concat_ws(' ', uuid, attempts, last_error), ', ' ORDER BY uuid)
		FROM outbox_parked JOIN outbox ON id = row_id`)
	if want := "a/2 1 pgoutbox: permanent failure: no such customer in [payload], b/2 4 busy"; parked != want {
		t.Errorf("parked %q, want %q", parked, want)
	}
	if lines := log.Lines("payload of"); len(lines) > 0 {
		t.Errorf("the payload was logged: %v", lines)
	}
	end()
	if n := sink.Times()["a/2"] + sink.Times()["b/2"]; n != 5 {
		t.Errorf("they were handled %d times, want 1 and 4", n)
	}
	mended.Store(true)
	db.Exec("UPDATE outbox_parked SET unpark = true WHERE last_error LIKE '%customer%'")
	end = route(t, db, log, handle)
	db.Eventually("one is back", "SELECT count(*) = 1 FROM outbox_parked")
	sink.Await(t, outboxtest.Patience, func([]outboxtest.Delivery) (bool, string) {
		return sink.Times()["a/2"] == 2, strings.Join(parkedUUIDs(db), " ")
	})
	end()
	if n := sink.Times()["b/2"]; n != 4 {
		t.Errorf("the other was handled %d times", n)
	}
}

// route runs a Router until end, with the Subscriber that it closes.
func route(t *testing.T, db *outboxtest.Outbox, log *outboxtest.Log, handle message.NoPublishHandlerFunc) (end func()) {
	t.Helper()
	sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group", MaxAttempts: 4}, log)
	db.Must(err)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: outboxtest.Patience}, watermill.NopLogger{})
	db.Must(err)
	router.AddMiddleware(pgoutbox.ReportErrors)
	router.AddConsumerHandler("handler", "orders", sub, handle)
	ended := make(chan error, 1)
	go func() { ended <- router.Run(t.Context()) }()
	<-router.Running()
	return func() {
		t.Helper()
		db.Must(router.Close())
		db.Must(<-ended)
	}
}
