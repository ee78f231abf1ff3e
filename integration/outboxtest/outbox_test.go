package outboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// failing is a test that notes how it fails instead of failing.
type failing struct {
	testing.TB

	said string
}

func (f *failing) Helper() {}

func (f *failing) Failed() bool { return f.said != "" }

func (f *failing) Errorf(format string, args ...any) { f.said += fmt.Sprintf(format, args...) }

func (f *failing) Error(args ...any) { f.said += fmt.Sprint(args...) }

func (f *failing) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

// failure is how a test fails that does this.
func failure(t *testing.T, do func(testing.TB)) string {
	t.Helper()
	f := &failing{TB: t}
	var done sync.WaitGroup
	done.Go(func() { do(f) })
	done.Wait()
	return f.said
}

func TestEventuallySaysWhatWasSeenLast(t *testing.T) {
	t.Parallel()
	n := 0
	said := failure(t, func(t testing.TB) {
		outboxtest.Eventually(t, 100*time.Millisecond, "pigs fly", func() (bool, string) {
			n++
			return false, fmt.Sprint("pig ", n)
		})
	})
	if want := fmt.Sprint("pigs fly; last seen: pig ", n); !strings.Contains(said, want) || n < 2 {
		t.Errorf("it failed with %q, which has no %q", said, want)
	}
	asked := 0
	outboxtest.Eventually(t, time.Minute, "the third answer is yes", func() (bool, string) {
		asked++
		return asked == 3, ""
	})
}

func TestRecordWakesWhoWaits(t *testing.T) {
	t.Parallel()
	var r outboxtest.Record[int]
	var adding sync.WaitGroup
	asked := make(chan struct{}, 100)
	adding.Go(func() {
		for i := range 10 {
			outboxtest.Next(t, "the wait looks", asked)
			r.Add(i)
		}
	})
	r.Await(t, time.Minute, func(all []int) (bool, string) {
		asked <- struct{}{}
		return len(all) == 10, fmt.Sprint(all)
	})
	adding.Wait()
	if odd := r.Of(func(i int) bool { return i%2 == 1 }); fmt.Sprint(odd) != "[1 3 5 7 9]" {
		t.Errorf("the odd ones are %v", odd)
	}
	said := failure(t, func(t testing.TB) {
		r.Await(t, time.Millisecond, func(all []int) (bool, string) { return false, fmt.Sprint(len(all), " events") })
	})
	if !strings.HasSuffix(said, "10 events") {
		t.Errorf("it failed with %q", said)
	}
}

func TestSinkSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	var s outboxtest.Sink
	for _, uuid := range []string{"a", "b", "a"} {
		s.Add(outboxtest.Received("reader", outboxtest.Message("key", uuid)))
	}
	s.Until(t, time.Minute, "a", "b")
	said := failure(t, func(t testing.TB) { s.Until(t, time.Millisecond, "a", "b", "c") })
	if !strings.Contains(said, `1 of 3 messages have not come: ["c"]`) {
		t.Errorf("it failed with %q", said)
	}
	if d := s.UntilTimes(t, time.Minute, "a", 2); d.At != s.All()[2].At {
		t.Errorf("the second delivery of a is %+v", d)
	}
	if said := failure(t, func(t testing.TB) { s.UntilTimes(t, time.Millisecond, "b", 2) }); !strings.Contains(said, "came 1 times, not 2") {
		t.Errorf("it failed with %q", said)
	}
}

func TestLogRemembersEveryLevelAndItsFields(t *testing.T) {
	t.Parallel()
	l := outboxtest.NewLog(t)
	shard := l.With(watermill.LogFields{"shard": 3}).With(watermill.LogFields{"term": 1})
	shard.Info("Leading", watermill.LogFields{"more": true})
	l.Trace("Looked", nil)
	l.Debug("Looked closer", nil)
	if said := failure(t, func(t testing.TB) { l.MustBeQuiet(t) }); said != "" {
		t.Errorf("a quiet log fails with %q", said)
	}
	l.Error("Stopped", errors.New("no route to host"), nil)
	if line := l.Until(t, "leading", "shard:3", "term:1", "more:true"); line.Level != "info" {
		t.Errorf("the line is %s", line)
	}
	if lines := l.Errors(); len(lines) != 1 || lines[0].Err == nil || len(l.Lines()) != 4 || len(l.Lines("looked")) != 2 {
		t.Errorf("the log says\n%s", l)
	}
	if said := failure(t, func(t testing.TB) { l.MustBeQuiet(t) }); !strings.Contains(said, "no route to host") {
		t.Errorf("a log with an error fails with %q", said)
	}
}

func TestRunningMustEndWithNil(t *testing.T) {
	t.Parallel()
	r := outboxtest.Run(t, func(ctx context.Context) error {
		<-ctx.Done()
		return nil
	})
	r.End()
	r.End()
	said := failure(t, func(t testing.TB) {
		f := t.(*failing)
		broken := &failing{TB: f.TB}
		t.Cleanup(func() { broken.said = "" })
		outboxtest.Run(noCleanup{broken}, func(context.Context) error { return errors.New("it broke") }).Ended()
		f.said = broken.said
	})
	if said != "Run returned it broke" {
		t.Errorf("it failed with %q", said)
	}
}

// noCleanup is a test that never ends.
type noCleanup struct{ *failing }

func (noCleanup) Cleanup(func()) {}

func TestOutboxIsReadBack(t *testing.T) {
	t.Parallel()
	o := outboxtest.New(t)
	uuids := o.Put(2, 2)
	o.Publish("", "lone")
	o.Publish("key 1", "keyed")
	if got := o.Text("SELECT string_agg(concat_ws('=', uuid, key), ' ' ORDER BY id) FROM outbox"); got !=
		"key 1/1=key 1 key 2/1=key 2 key 1/2=key 1 key 2/2=key 2 lone keyed=key 1" || len(uuids) != 4 {
		t.Errorf("the rows are %s", got)
	}
	for shard := range 3 {
		o.Publish(o.KeyIn(shard, 3, 1), fmt.Sprint("in ", shard))
		if got := outboxtest.Ask[int](o, "SELECT slot % 3 FROM outbox WHERE uuid = $1", fmt.Sprint("in ", shard)); got != shard {
			t.Errorf("a key for shard %d falls into %d", shard, got)
		}
	}
	name, pool := o.Role()
	if _, err := pool.Exec(t.Context(), "SELECT FROM outbox"); err == nil {
		t.Errorf("%s may read the outbox", name)
	}
}

func TestLocksOfALeaderAreSeen(t *testing.T) {
	t.Parallel()
	o := outboxtest.New(t)
	leader, err := pgoutbox.NewLeader(o.Pool, pgoutbox.LeaderConfig{Name: "test", Shards: 3, RetryInterval: 20 * time.Millisecond}, outboxtest.NewLog(t))
	o.Must(err)
	o.MustBeClean()
	r := outboxtest.Run(t, func(ctx context.Context) error {
		return leader.Run(ctx, func(ctx context.Context, _ pgoutbox.Lead) error {
			<-ctx.Done()
			return nil
		})
	})
	o.AwaitLocks(3)
	o.AwaitSessions(1)
	before := o.LockSessions()
	if n := o.EndLockSessions(); n != 1 || len(before) != 1 {
		t.Errorf("%d of lock sessions %v were ended", n, before)
	}
	outboxtest.Eventually(t, outboxtest.Patience, "another session holds the locks", func() (bool, string) {
		now := o.LockSessions()
		return len(now) == 1 && now[0] != before[0], fmt.Sprint(now)
	})
	r.End()
	o.MustBeClean()
}
