package outboxtest

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Nobody is a Publisher that nothing must reach.
type Nobody struct{ T testing.TB }

// Publish fails the test.
func (n Nobody) Publish(string, ...*message.Message) error {
	n.T.Error("a row was published")
	return nil
}

// Close does nothing.
func (Nobody) Close() error { return nil }
