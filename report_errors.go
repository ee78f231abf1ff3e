package pgoutbox

import (
	"context"
	"errors"
	"strings"

	"github.com/ThreeDotsLabs/watermill/message"
)

// ReportErrors is a Router middleware that tells the Subscriber why a handler failed, which a nack does not: the row is parked with
// that error as its reason, and at once when it is, or wraps, ErrPermanent. Add it first, so that it sees what the handler and
// every other middleware made of it:
//
//	router.AddMiddleware(pgoutbox.ReportErrors, middleware.Retry{MaxRetries: 3}.Middleware)
//
// A Publisher made by RouteByTopic reports its errors by itself. Messages of other Subscribers pass untouched.
func ReportErrors(handler message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		produced, err := handler(msg)
		report(msg, err)
		return produced, err
	}
}

// report keeps an error for the Subscriber that the message came from.
func report(msg *message.Message, err error) {
	if err == nil {
		return
	}
	if c, ok := msg.Context().Value(rowKey{}).(*rowContext); ok {
		err = redacted(err, msg)
		c.failed.Store(&err)
	}
}

// reported returns what was kept, nil when nothing was.
func reported(ctx context.Context) error {
	if c, ok := ctx.Value(rowKey{}).(*rowContext); ok {
		if err := c.failed.Load(); err != nil {
			return *err
		}
	}
	return nil
}

// redactedError is an error whose text had part of a message in it.
type redactedError struct {
	error

	text string
}

func (e redactedError) Error() string { return e.text }
func (e redactedError) Unwrap() error { return e.error }

// redactMin is how long a payload or metadata value must be to be looked for: everything contains "a".
const redactMin = 4

// redacted is err without the payloads and metadata values of the messages, should it quote them. What a Publisher or a handler
// says is logged and stored, and a message may hold what nobody must read there.
func redacted(err error, messages ...*message.Message) error {
	if err == nil || errors.As(err, new(redactedError)) {
		return err
	}
	text := err.Error()
	for _, msg := range messages {
		if len(msg.Payload) >= redactMin {
			text = strings.ReplaceAll(text, string(msg.Payload), "[payload]")
		}
		for key, value := range msg.Metadata {
			if len(value) >= redactMin {
				text = strings.ReplaceAll(text, value, "["+key+"]")
			}
		}
	}
	if text == err.Error() {
		return err
	}
	return redactedError{err, text}
}
