// Package brokers forwards outbox rows to real brokers and looks at what arrived with clients that are not Watermill's.
package brokers

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) {
	// One goroutine of sarama's metrics serves every producer, and never ends.
	os.Exit(pgserver.Run(m, goleak.IgnoreTopFunction("github.com/rcrowley/go-metrics.(*meterArbiter).tick")))
}
