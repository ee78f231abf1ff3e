package outboxtest

import (
	"os"
	"time"
)

// Full reports whether PGOUTBOX_TEST_FULL asks for the full lengths and rounds, as `make cases` does.
func Full() bool { return os.Getenv("PGOUTBOX_TEST_FULL") != "" }

// Length is how long a wait of the full run takes in this one: 30 s and more become 5 s.
func Length(full time.Duration) time.Duration {
	if Full() || full < 30*time.Second {
		return full
	}
	return 5 * time.Second
}

// Rounds is how many rounds of the full run this one makes: a tenth, and at least 5.
func Rounds(full int) int {
	if Full() {
		return full
	}
	return max(full/10, min(full, 5))
}
