package universal_test

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// The suite reads from many Subscribers at once through a multiplier of its own, which goes on holding the message it has taken
// when the suite stops reading. Nothing of ours is let off.
const multiplier = "github.com/ThreeDotsLabs/watermill/internal/subscriber.(*multiplier).Subscribe."

func TestMain(m *testing.M) {
	os.Exit(pgserver.Run(m,
		goleak.IgnoreAnyFunction(multiplier+"func2"),                                                    // holds a message
		goleak.IgnoreAnyFunction(multiplier+"func3"),                                                    // waits for it
		goleak.IgnoreAnyFunction("github.com/ThreeDotsLabs/watermill/pubsub/tests.TestReconnect.func2"), // collects until the process ends
	))
}
