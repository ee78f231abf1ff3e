package torture

import (
	"context"

	"github.com/ThreeDotsLabs/watermill/message"
	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// putPublished writes messages with the Publisher, in the transaction that is open on the connection. Runs of one topic go
// in one call: more would change the order of a key whose messages go to several topics.
func (t *transaction) putPublished(ctx context.Context, messages []Message) error {
	pub, err := pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		return err
	}
	bound := pub.WithTx(t.conn)
	for first := 0; first < len(messages); {
		topic := messages[first].topic()
		var run []*message.Message
		for _, m := range messages[first:] {
			if m.topic() != topic {
				break
			}
			run = append(run, m.watermill(ctx))
		}
		if err := bound.Publish(topic, run...); err != nil {
			return err
		}
		first += len(run)
	}
	return nil
}

func (m Message) watermill(ctx context.Context) *message.Message {
	msg := message.NewMessageWithContext(ctx, m.uuid(), m.payload())
	if m.Key != "" {
		msg.Metadata.Set(pgoutbox.OrderingKey, m.Key)
	}
	return msg
}
