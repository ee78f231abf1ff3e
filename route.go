package pgoutbox

import (
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// RouteByTopic wraps the Publisher of a Router's handler so that each message goes to the topic its row was published to,
// whatever publish topic the handler was given ("" will do):
//
//	router.AddHandler("relay", pgoutbox.AllTopics, sub, "", pgoutbox.RouteByTopic(pub), message.PassthroughHandler)
//
// A message that the handler made anew has no row in its context and is refused with an error that says so: give such a
// handler a fixed publish topic, or msg.SetContext(original.Context()).
//
// It is as safe for concurrent use as pub. Its Close does nothing, because a Router closes the Publishers of its handlers
// when the first of them ends; close pub after Router.Run has returned.
func RouteByTopic(pub message.Publisher) message.Publisher {
	return RouteByTopicFunc(pub, func(row Row) (string, error) { return row.Topic, nil })
}

// RouteByTopicFunc is RouteByTopic with a destination of your choice for each row. An error of f is returned by Publish, so the
// message is nacked; messages before it in the same call have gone out.
func RouteByTopicFunc(pub message.Publisher, f func(Row) (string, error)) message.Publisher {
	return &router{pub: pub, topic: f}
}

type router struct {
	pub   message.Publisher
	topic func(Row) (string, error)
}

var errNoRow = errors.New("the message has no outbox row in its context: give the handler a fixed publish topic, " +
	"or call msg.SetContext(original.Context()) on messages that it makes")

func (r *router) Publish(_ string, messages ...*message.Message) error {
	for i, msg := range messages {
		row, ok := RowFromContext(msg.Context())
		if !ok {
			return fmt.Errorf("pgoutbox: route message %d: %w", i, errNoRow)
		}
		if err := r.publish(row, msg); err != nil {
			report(msg, err)
			return err
		}
	}
	return nil
}

func (r *router) publish(row Row, msg *message.Message) error {
	topic, err := r.topic(row)
	if err != nil {
		return fmt.Errorf("pgoutbox: route row %d: %w", row.ID, err)
	}
	if err := r.pub.Publish(topic, msg); err != nil {
		return fmt.Errorf("pgoutbox: publish row %d: %w", row.ID, redacted(err, msg))
	}
	return nil
}

func (r *router) Close() error { return nil }
