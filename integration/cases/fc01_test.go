package cases_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-01: transaction A draws its number first and commits last. A reader that follows the numbers passes it by.
func TestFC01_RowCommittedLateIsNotSkipped(t *testing.T) {
	t.Parallel()
	keys := []struct {
		name            string
		shardB, numberB int // of B's key; A's is the first of shard 3
	}{
		{"same key", 3, 0},
		{"two keys of one shard", 3, 1},
		{"two shards", 4, 0},
	}
	for _, k := range keys {
		for _, publishesLast := range []bool{false, true} {
			for _, restart := range []bool{false, true} {
				name := fmt.Sprintf("%s/A publishes last %t/restart %t", k.name, publishesLast, restart)
				t.Run(name, func(t *testing.T) {
					t.Parallel()
					ob := newOutbox(t)
					lateCommit(t, ob, ob.KeyIn(3, 16, 0), ob.KeyIn(k.shardB, 16, k.numberB), publishesLast, restart)
				})
			}
		}
	}
}

func lateCommit(t *testing.T, ob *outbox, keyA, keyB string, publishesLast, restart bool) {
	s := newSink()
	a := ob.begin(t)
	if publishesLast {
		_, err := a.Exec(t.Context(), "SELECT pg_current_xact_id()")
		must(t, err)
	} else {
		must(t, a.publish(keyA, "m1"))
	}
	ob.put(t, keyB, "m2")
	r := ob.read(t, "P1", s, ackAll)
	s.await(t, 3*time.Second, "m2") // nothing waits for an open transaction
	if publishesLast {
		must(t, a.publish(keyA, "m1"))
		ob.put(t, keyB, "m3")
		s.await(t, 3*time.Second, "m3")
	}
	if restart {
		r.close(t)
		r = ob.read(t, "P1 again", s, ackAll)
		ob.probe(t, s, 5*time.Second)
	}
	must(t, a.Commit(t.Context()))
	s.await(t, 5*time.Second, "m1")
	ob.judge(t, s)
	r.close(t)
	s.mustHaveComeOnce(t)
}

func TestFC01_WritersThatCommitAtRandomLoseNothing(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	r := ob.read(t, "P1", s, ackAll)
	deadline := time.Now().Add(outboxtest.Length(60 * time.Second))
	var writers errgroup.Group
	for writer := range 8 {
		writers.Go(func() error {
			for n := 0; time.Now().Before(deadline); n++ {
				w, err := ob.beginTx(t.Context())
				if err != nil {
					return err
				}
				if err := w.publish(fmt.Sprintf("key %d", rand.IntN(5)), fmt.Sprintf("m %d %d", writer, n)); err != nil {
					return err
				}
				outboxtest.Pause(t.Context(), rand.N(200*time.Millisecond))
				end := w.Commit
				if rand.IntN(10) == 0 {
					end = w.Rollback
				}
				if err := end(t.Context()); err != nil {
					return err
				}
			}
			return nil
		})
	}
	must(t, writers.Wait())
	ob.judge(t, s)
	r.close(t)
	s.mustHaveComeOnce(t)
	t.Logf("%d messages committed", len(ob.oracle()))
}
