package universal_test

import (
	"os"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }
