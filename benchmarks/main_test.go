package main

import (
	"os"
	"testing"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// Every drain reads each row, or it would not come to an end.
func TestEveryDrainReadsEverything(t *testing.T) {
	if err := bench(t.Context(), load{rows: 3000, shards: 4, keys: 50, payload: 64, runs: 1}); err != nil {
		t.Fatal(err)
	}
}
