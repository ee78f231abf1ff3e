package torture

import (
	"context"
	"math/rand/v2"
	"time"
)

// pause waits for d, or returns ctx's error as soon as it ends.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// between draws a duration from low to high.
func between(rnd *rand.Rand, low, high time.Duration) time.Duration {
	if high <= low {
		return low
	}
	return low + time.Duration(rnd.Int64N(int64(high-low)))
}
