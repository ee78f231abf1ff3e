package pgoutbox

import (
	"context"
	"errors"
	"io"
	"testing"
	"testing/synctest"
	"time"
)

func TestAnyMessagesContextEndsThePublish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type key struct{}
		first, cancelFirst := context.WithCancel(context.WithValue(context.Background(), key{}, "first"))
		defer cancelFirst()
		second, cancelSecond := context.WithTimeout(context.WithValue(context.Background(), key{}, "second"), time.Second)
		defer cancelSecond()

		ctx, release, err := joinContexts(carrying(first, first, context.Background(), second, second))
		if err != nil {
			t.Fatal(err)
		}
		defer release()
		if got := ctx.Value(key{}); got != "first" {
			t.Errorf("value %v", got)
		}
		select {
		case <-ctx.Done():
		case <-time.After(2 * time.Second): // by the bubble's clock
			t.Fatal("the second message's deadline passed unnoticed")
		}
		if err := withCause(ctx, ctx.Err()); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v does not say why", err)
		}
	})
}

func TestReleasedContextsKeepNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // which fails when a goroutine stays
		second, cancel := context.WithCancel(context.Background())
		ctx, release, err := joinContexts(carrying(context.Background(), second))
		if err != nil {
			t.Fatal(err)
		}
		release()
		cancel()
		synctest.Wait()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
			t.Errorf("cause %v", cause)
		}
	})
}

func TestEndedContextIsRefusedWithItsReason(t *testing.T) {
	reason := errors.New("reason")
	ended, cancel := context.WithCancelCause(context.Background())
	cancel(reason)
	_, _, err := joinContexts(carrying(context.Background(), ended))
	if !errors.Is(err, context.Canceled) || !errors.Is(err, reason) {
		t.Errorf("error %v", err)
	}
}

func TestCauseIsAddedOnce(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	if err := withCause(ctx, io.EOF); err != io.EOF { //nolint:errorlint // it must be the very same
		t.Errorf("a running context adds %v", err)
	}
	cancel()
	if err := withCause(ctx, context.Canceled); err != context.Canceled { //nolint:errorlint // it must be the very same
		t.Errorf("got %v", err)
	}
}
