//go:build stress

package universal_test

import (
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// TestStress runs the whole suite STRESS_TEST_COUNT times (10) side by side, on one table. The suite has a build tag of the same
// name, which gives it longer timeouts.
func TestStress(t *testing.T) {
	s := newSetup(t, pgoutbox.SubscriberConfig{Shards: 16})
	s.key = func(_ string, msg *message.Message) string { return string(msg.Payload) }
	tests.TestPubSubStressTest(t, features(),
		func(t *testing.T) (message.Publisher, message.Subscriber) { return s.pubSub(t, "test") },
		func(t *testing.T, group string) (message.Publisher, message.Subscriber) { return s.pubSub(t, group) },
	)
}
