package cases_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/torture"
)

// children are the Subscribers that can run in a process of their own, by name.
var children = map[string]torture.Reader{
	"one shard": childReader{pgoutbox.SubscriberConfig{ConsumerGroup: "group", Shards: 1}},
}

// childReader runs in the child. A delivery travels to the parent as JSON in the payload.
type childReader struct {
	cfg pgoutbox.SubscriberConfig
}

func (c childReader) Run(ctx context.Context, dsn string, deliver torture.Deliver) error {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	sub, err := pgoutbox.NewSubscriber(pool, c.cfg, nil)
	if err != nil {
		return err
	}
	messages, err := sub.Subscribe(ctx, outboxtest.Topic)
	if err != nil {
		return err
	}
	var handlers sync.WaitGroup
	defer handlers.Wait()
	for msg := range messages {
		text, err := json.Marshal(received("", msg))
		if err != nil {
			return err
		}
		ack := deliver(torture.Delivery{Payload: text})
		handlers.Go(func() {
			if ack(msg.Context()) == nil {
				msg.Ack()
			} else {
				msg.Nack()
			}
		})
	}
	return sub.Close()
}

// child is a process that can be killed. Its handler runs here, so the log here knows about every delivery.
type child struct {
	end   context.CancelCauseFunc
	ended chan error
}

// child starts one of children.
func (ob *outbox) child(t testing.TB, role, name string, s *sink, handle handler) *child {
	t.Helper()
	ctx, end := context.WithCancelCause(context.Background())
	c := &child{end: end, ended: make(chan error, 1)}
	go func() { // owned by kill, which the end of the test calls in any case
		c.ended <- torture.Process{Role: role, Logf: t.Logf}.Run(ctx, ob.DSN, func(d torture.Delivery) torture.Ack {
			var got delivery
			if err := json.Unmarshal(d.Payload, &got); err != nil {
				return func(context.Context) error { return err }
			}
			got.Reader, got.At = name, time.Now()
			s.Add(got)
			return func(ctx context.Context) error {
				if err := handle(ctx, got); err != nil {
					return fmt.Errorf("%w: %w", torture.ErrRefused, err)
				}
				return nil
			}
		})
	}()
	t.Cleanup(func() { c.kill(t) })
	return c
}

// kill is SIGKILL, and waits until the process is gone.
func (c *child) kill(t testing.TB) {
	t.Helper()
	c.end(torture.ErrKilled)
	select {
	case err := <-c.ended:
		c.ended <- nil // kill may be called again
		if err != nil && !errors.Is(err, torture.ErrKilled) {
			t.Errorf("the child: %v", err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("a killed process did not end")
	}
}
