// Package parking shows what becomes of rows that nobody can take.
package parking

import (
	"os"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }
