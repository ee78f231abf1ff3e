package cases_test

import (
	"fmt"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// FC-11: publishes that were rolled back leave holes in the numbers. A hole must neither be waited for nor be jumped over by
// the clock.
func TestFC11_HolesInTheNumbersCostNothing(t *testing.T) {
	t.Parallel()
	for _, idle := range []bool{false, true} {
		t.Run(fmt.Sprintf("another session idle in transaction %t", idle), func(t *testing.T) {
			t.Parallel()
			ob := newOutbox(t)
			if idle {
				ob.Exec("CREATE TABLE unrelated (n int)")
				other := ob.begin(t)
				_, err := other.Exec(t.Context(), "INSERT INTO unrelated VALUES (1)")
				must(t, err)
			}
			holes(t, ob)
		})
	}
}

func holes(t *testing.T, ob *outbox) {
	const poll = time.Second // two of them are more than a busy machine takes, and less than any timeout
	s, polls := newSink(), func(c *pgoutbox.SubscriberConfig) { c.PollInterval = poll }

	for n := range 50 {
		w := ob.begin(t)
		must(t, w.publish("key", fmt.Sprintf("rolled back %d", n)))
		must(t, w.Rollback(t.Context()))
	}
	r := ob.read(t, "P1", s, ackAll, polls)
	ob.AwaitLocks(16)
	ob.probe(t, s, 2*poll) // behind a hole at the very start

	// A row that is still to come, a hole behind it, and a process that remembers neither.
	open := ob.begin(t)
	must(t, open.publish("key", "before the hole"))
	burn := ob.begin(t)
	must(t, burn.publish("key", make([]string, 10_000)...))
	must(t, burn.Rollback(t.Context()))
	r.close(t)
	r2 := ob.read(t, "P1 again", s, ackAll, polls)
	ob.AwaitLocks(16)
	ob.probe(t, s, 2*poll)

	// A hole that no window of ids spans, met by a process that is running and by one that has just started.
	ob.Exec("SELECT count(nextval('outbox_id_seq')) FROM generate_series(1, 100000)")
	ob.probe(t, s, 2*poll)
	ob.Exec("SELECT count(nextval('outbox_id_seq')) FROM generate_series(1, 100000)")
	r2.close(t)
	r3 := ob.read(t, "P1 once more", s, ackAll, polls)
	ob.AwaitLocks(16)
	ob.probe(t, s, 2*poll)

	must(t, open.Commit(t.Context()))
	s.await(t, 2*poll, "before the hole")
	ob.judge(t, s)
	r3.close(t)
	s.mustHaveComeOnce(t)
	for _, one := range []*reader{r, r2, r3} {
		for _, line := range one.log.Errors() {
			t.Errorf("a hole was worth a line in the log: %s", line)
		}
	}
}
