package cases_test

import (
	"fmt"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// FC-38: somebody empties the outbox and has its ids begin anew, below every stored position. What is written then has ids that
// were delivered before, and must be delivered all the same.
func TestFC38_RowsAfterTruncateRestartIdentityCome(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running %t", running), func(t *testing.T) {
			t.Parallel()
			ob, s := newOutbox(t), newSink()
			ob.afterRewind(t, s, running, func() { ob.Exec("TRUNCATE outbox RESTART IDENTITY") }, 1, 10)
		})
	}
}

// FC-29: the rows and their sequence are those of an earlier time, and the position is not.
func TestFC29_RowsBelowThePositionCome(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running %t", running), func(t *testing.T) {
			t.Parallel()
			ob, s := newOutbox(t), newSink()
			ob.afterRewind(t, s, running, func() {
				ob.Exec("DELETE FROM outbox WHERE id > 100")
				ob.Exec("SELECT setval('outbox_id_seq', 100)")
			}, 101, 50)
		})
	}
}

// afterRewind has 200 rows delivered, rewinds the ids, and writes n rows, the first of which must get the id first: all of them come,
// once, in their order.
func (ob *outbox) afterRewind(t *testing.T, s *sink, running bool, rewind func(), first int64, n int) {
	t.Helper()
	var before, after []string
	for i := range 200 {
		before = append(before, fmt.Sprintf("before %d", i))
	}
	for i := range n {
		after = append(after, fmt.Sprintf("after %d", i))
	}
	oneShard := func(c *pgoutbox.SubscriberConfig) { c.Shards = 1 }
	r := ob.read(t, "reader", s, ackAll, oneShard)
	ob.put(t, "key", before...)
	s.await(t, 20*time.Second, before...)
	ob.awaitPending(t, ob.ID(before[199]))
	if !running {
		r.close(t)
	}
	rewind()
	ob.put(t, "key", after...)
	if got := ob.ID(after[0]); got != first {
		t.Fatalf("the trap is none: the first row after it has id %d, not %d", got, first)
	}
	if !running {
		r = ob.read(t, "reader again", s, ackAll, oneShard)
	}
	s.await(t, 10*time.Second, after...)
	ob.probe(t, s, 5*time.Second)
	r.close(t)
	ob.judgeDeliveries(t, s) // the marks of the positions go back, as the sequence did
	s.mustHaveComeOnce(t)
	last := -1
	for _, d := range s.All() {
		var i int
		if _, err := fmt.Sscanf(d.UUID, "after %d", &i); err == nil {
			if i != last+1 {
				t.Errorf("row %d of the key came after row %d", i, last)
			}
			last = i
		}
	}
}
