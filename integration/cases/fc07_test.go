package cases_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

// FC-07: later messages are acked while an earlier one is not. What is stored must still know of the earlier one when the
// process is killed.
func TestFC07_AckOutOfOrderKeepsTheGap(t *testing.T) {
	t.Parallel()
	for _, keyed := range []bool{false, true} {
		t.Run(fmt.Sprintf("keys %t/m1 is held", keyed), func(t *testing.T) {
			t.Parallel()
			ob, s, g := newOutbox(t), newSink(), newGate("m1")
			tenMessages(t, ob, keyed)
			p1 := ob.child(t, "one shard", "P1", s, g.handle)
			s.await(t, 20*time.Second, "m1", "m10")
			killAndRestart(t, ob, s, p1, "m1", 2)
		})
		t.Run(fmt.Sprintf("keys %t/m3 is nacked after m4 was acked", keyed), func(t *testing.T) {
			t.Parallel()
			ob, s, g := newOutbox(t), newSink(), newGate("m3")
			tenMessages(t, ob, keyed)
			p1 := ob.child(t, "one shard", "P1", s, g.handle)
			s.await(t, 20*time.Second, "m4", "m10")
			ob.awaitPending(t, ob.ID("m10"), ob.ID("m3"))
			g.finish("m3", errors.New("refused"))
			if again := s.awaitTimes(t, 5*time.Second, "m3", 2); again.Row.Attempt != 2 {
				t.Errorf("after the nack m3 came as attempt %d", again.Row.Attempt)
			}
			killAndRestart(t, ob, s, p1, "m3", 3)
		})
	}
}

func tenMessages(t *testing.T, ob *outbox, keyed bool) {
	for n := 1; n <= 10; n++ {
		key := ""
		if keyed {
			key = fmt.Sprintf("key %d", n)
		}
		ob.put(t, key, fmt.Sprintf("m%d", n))
	}
}

// killAndRestart kills P1, which holds one message back, when the acks of the others are stored.
func killAndRestart(t *testing.T, ob *outbox, s *sink, p1 *child, held string, times int) {
	past, want := ob.ID("m10"), ob.ID(held)
	ob.awaitPending(t, past, want)
	p1.kill(t)
	if c := ob.Cursors()[0]; !slices.Equal(c.Pending, []int64{want}) {
		t.Errorf("after the kill the stored pending rows are %v, want only %s, row %d", c.Pending, held, want)
	}

	p1again := ob.read(t, "P1 again", s, ackAll)
	s.awaitTimes(t, 15*time.Second, held, times)
	ob.put(t, "", "m11")
	s.await(t, 5*time.Second, "m11")
	ob.judge(t, s)
	p1again.close(t)
	s.mustHaveCome(t, map[string]int{held: times})
	if c := ob.Cursors()[0]; len(c.Pending) != 0 {
		t.Errorf("after everything was acked the stored pending rows are %v", c.Pending)
	}
}
