package pgoutbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"
)

// joinContexts returns the first message's context, ended too by the end of any other's. It returns an error if one has
// ended already: to send and cancel at once would break the connection for nothing. Call release when done.
func joinContexts(messages []*message.Message) (ctx context.Context, release func(), err error) {
	ctx, cancel := context.WithCancelCause(messages[0].Context())
	var unlink []func() bool
	release = func() {
		for _, stop := range unlink {
			stop()
		}
		cancel(nil)
	}
	seen := map[<-chan struct{}]bool{nil: true, messages[0].Context().Done(): true}
	for i, msg := range messages {
		other := msg.Context()
		if other.Err() != nil {
			release()
			return nil, nil, fmt.Errorf("message %d: its context has ended, nothing was sent: %w", i, withCause(other, other.Err()))
		}
		if seen[other.Done()] { // most messages share one context
			continue
		}
		seen[other.Done()] = true
		unlink = append(unlink, context.AfterFunc(other, func() { cancel(context.Cause(other)) }))
	}
	return ctx, release, nil
}

// withCause adds to err why ctx ended, if err does not say so itself: to pgx the end of the second message's deadline is only
// a cancellation.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", err, cause)
	}
	return err
}
