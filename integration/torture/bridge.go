package torture

import (
	"context"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// Bridge is the library's PublisherBridge on every topic, with the defaults that users get. The publisher that it feeds is
// the sink.
type Bridge struct {
	Group  string
	Logger watermill.LoggerAdapter
}

// Run delivers until ctx ends, and then waits for what is in flight.
func (b Bridge) Run(ctx context.Context, dsn string, deliver Deliver) error {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	bridge, err := pgoutbox.NewPublisherBridge(pool, broker{deliver}, pgoutbox.BridgeConfig{ConsumerGroup: b.Group}, b.Logger)
	if err != nil {
		return err
	}
	return bridge.Run(ctx)
}

// broker is the sink as a Watermill Publisher: it takes one message after the other, as every broker's publisher does.
type broker struct{ deliver Deliver }

// Publish returns when the last message is acknowledged, or at the first that is not.
func (b broker) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		row, _ := pgoutbox.RowFromContext(msg.Context())
		if err := b.deliver(delivery(row, topic, msg))(msg.Context()); err != nil {
			return err
		}
	}
	return nil
}

// Close is never called by a bridge.
func (b broker) Close() error { return nil }
