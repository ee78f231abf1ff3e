package torture

import (
	"context"
	"fmt"
	"sync"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// Subscriber is the library's Subscriber on every topic, with the defaults that users get. A goroutine handles each
// message, as the Router does it.
type Subscriber struct {
	Group  string
	Logger watermill.LoggerAdapter
}

// Run delivers until ctx ends, and then closes the subscriber, which waits for what is in flight.
func (s Subscriber) Run(ctx context.Context, dsn string, deliver Deliver) error {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: s.Group}, s.Logger)
	if err != nil {
		return err
	}
	messages, err := sub.Subscribe(ctx, pgoutbox.AllTopics)
	if err != nil {
		return fmt.Errorf("subscribe: %w", err)
	}
	var handlers sync.WaitGroup
	for msg := range messages {
		row, _ := pgoutbox.RowFromContext(msg.Context()) // without one the topic is wrong, which the sink sees
		ack := deliver(delivery(row, row.Topic, msg))
		handlers.Go(func() {
			if ack(msg.Context()) == nil {
				msg.Ack()
			} else {
				msg.Nack()
			}
		})
	}
	handlers.Wait()
	if err := sub.Close(); err != nil {
		return fmt.Errorf("close the subscriber: %w", err)
	}
	return nil
}

// delivery takes the key from where users find it.
func delivery(row pgoutbox.Row, topic string, msg *message.Message) Delivery {
	return Delivery{Row: row.ID, Topic: topic, Key: msg.Metadata.Get(pgoutbox.OrderingKey), Payload: msg.Payload}
}
