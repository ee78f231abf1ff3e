package cases_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// FC-20: a process subscribes twice to the same. The locks of a session are granted to it again and again, so they alone keep
// nobody apart, and what was taken twice must be given back twice.
func TestFC20_SecondSubscriptionOfOneProcessTakesTurns(t *testing.T) {
	t.Parallel()
	const retry = 2 * time.Second
	slow := func(c *pgoutbox.SubscriberConfig) { c.RetryInterval = retry }
	t.Run("through one Subscriber", func(t *testing.T) {
		t.Parallel()
		ob, s := newOutbox(t), newSink()
		r := ob.reader(t, slow)
		first := r.subscribe(t, "first", s, ackAll)
		ob.AwaitLocks(16)
		second := r.subscribe(t, "second", s, ackAll)
		takeTurns(t, ob, s, 2*retry, func() { first.end(t) })

		second.end(t)
		if locks := ob.Locks(); len(locks) != 0 {
			t.Errorf("both subscriptions have ended, and the session holds %v", locks)
		}
		r.close(t)
		ob.MustBeClean()
	})
	t.Run("through two Subscribers", func(t *testing.T) {
		t.Parallel()
		ob, s := newOutbox(t), newSink()
		first := ob.read(t, "first", s, ackAll, slow)
		ob.AwaitLocks(16)
		second := ob.read(t, "second", s, ackAll, slow)
		takeTurns(t, ob, s, 2*retry, func() { first.close(t) })

		second.close(t)
		ob.MustBeClean()
	})
}

// takeTurns has the first subscription deliver everything until it ends, and the second one everything from then on.
func takeTurns(t *testing.T, ob *outbox, s *sink, within time.Duration, endFirst func()) {
	two := func(part string) []string {
		var uuids []string
		for n := range 200 {
			uuids = append(uuids, fmt.Sprintf("%s %d", part, n))
			ob.put(t, fmt.Sprintf("key %d", n%40), uuids[n])
		}
		return uuids
	}
	s.await(t, 10*time.Second, two("before")...)
	oneHolder(t, ob)
	if n := len(s.by("second")); n != 0 {
		t.Errorf("ONE-OWNER: while the first subscription led, the second emitted %d messages", n)
	}
	endFirst()
	before := len(s.by("first"))
	if d := ob.probe(t, s, within); d.Reader != "second" {
		t.Errorf("after the end of the first subscription %s delivered", d.Reader)
	}
	s.await(t, 10*time.Second, two("after")...)
	ob.AwaitLocks(16)
	oneHolder(t, ob)
	if after := len(s.by("first")); after != before {
		t.Errorf("the first subscription emitted %d messages after its end", after-before)
	}
	ob.judge(t, s)
	s.mustHaveComeOnce(t)
	s.mustHaveOneOwner(t)
}

func oneHolder(t *testing.T, ob *outbox) {
	t.Helper()
	if locks := ob.Locks(); len(locks) != 16 || len(slices.Compact(locks)) != 16 {
		t.Errorf("want one holder for each of 16 shards, got %v", locks)
	}
}
