package cases_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// delivery is one message in a handler's hands, copied as it came.
type delivery struct {
	At       time.Time
	Reader   string
	UUID     string
	Row      pgoutbox.Row
	Payload  []byte
	Metadata message.Metadata

	msg *message.Message // the very one; nil when a child has it
}

// sink is the log of all deliveries.
type sink struct{ outboxtest.Record[delivery] }

func newSink() *sink { return &sink{} }

// of returns the deliveries of a message in their order.
func (s *sink) of(uuid string) []delivery {
	return slices.DeleteFunc(s.All(), func(d delivery) bool { return d.UUID != uuid })
}

// by returns the deliveries of a reader in their order.
func (s *sink) by(reader string) []delivery {
	return slices.DeleteFunc(s.All(), func(d delivery) bool { return d.Reader != reader })
}

// await waits until each message was delivered, and returns the first delivery of the last one named.
func (s *sink) await(t testing.TB, within time.Duration, uuids ...string) delivery {
	t.Helper()
	var first delivery
	missing := map[string]bool{}
	s.Await(t, within, func(log []delivery) (bool, string) {
		clear(missing)
		for _, uuid := range uuids {
			missing[uuid] = true
		}
		for _, d := range log {
			if missing[d.UUID] && d.UUID == uuids[len(uuids)-1] {
				first = d
			}
			delete(missing, d.UUID)
		}
		return len(missing) == 0, fmt.Sprintf("NO-LOSS: %d of %d messages are missing: %s", len(missing), len(uuids), some(missing))
	})
	return first
}

// awaitTimes waits until a message was delivered so many times.
func (s *sink) awaitTimes(t testing.TB, within time.Duration, uuid string, times int) delivery {
	t.Helper()
	var last delivery
	s.Await(t, within, func(log []delivery) (bool, string) {
		n := 0
		for _, d := range log {
			if d.UUID == uuid {
				n, last = n+1, d
			}
		}
		return n >= times, fmt.Sprintf("%q was delivered %d times, not %d", uuid, n, times)
	})
	return last
}

// mustHaveCome demands how often each message was delivered; those not named once.
func (s *sink) mustHaveCome(t testing.TB, times map[string]int) {
	t.Helper()
	counts := map[string]int{}
	for _, d := range s.All() {
		counts[d.UUID]++
	}
	for uuid, n := range counts {
		want, named := times[uuid]
		if !named {
			want = 1
		}
		if n != want {
			t.Errorf("%q was delivered %d times, not %d: %s", uuid, n, want, describe(s.of(uuid)))
		}
	}
}

// mustHaveComeOnce demands that nothing was repeated.
func (s *sink) mustHaveComeOnce(t testing.TB) {
	t.Helper()
	s.mustHaveCome(t, nil)
}

// mustHaveOneOwner demands that a term of a shard had one reader: ONE-OWNER.
func (s *sink) mustHaveOneOwner(t testing.TB) {
	t.Helper()
	type lead struct {
		shard int
		term  int64
	}
	owner := map[lead]string{}
	for _, d := range s.All() {
		l := lead{d.Row.Shard, d.Row.Term}
		if before, ok := owner[l]; ok && before != d.Reader {
			t.Errorf("ONE-OWNER: %s and %s both emitted shard %d in term %d", before, d.Reader, l.shard, l.term)
		}
		owner[l] = d.Reader
	}
}

func describe(log []delivery) string {
	var out []string
	for _, d := range log {
		out = append(out, fmt.Sprintf("%s by %s, row %d, shard %d, term %d, attempt %d",
			d.At.Format("15:04:05.000"), d.Reader, d.Row.ID, d.Row.Shard, d.Row.Term, d.Row.Attempt))
	}
	return strings.Join(out, "; ")
}

// some names a few of many.
func some(set map[string]bool) string {
	var names []string
	for name := range set {
		names = append(names, name)
	}
	slices.Sort(names)
	return fmt.Sprintf("%q", names[:min(len(names), 10)])
}

// handler decides about a delivery that was logged: nil acks, an error nacks. ctx is the message's.
type handler func(ctx context.Context, d delivery) error

func ackAll(context.Context, delivery) error { return nil }

// gate is a handler that keeps some messages waiting and acks all others at once.
type gate struct {
	verdicts map[string]chan error
}

func newGate(uuids ...string) *gate {
	g := &gate{verdicts: map[string]chan error{}}
	for _, uuid := range uuids {
		g.verdicts[uuid] = make(chan error, 16)
	}
	return g
}

func (g *gate) handle(ctx context.Context, d delivery) error {
	verdict, kept := g.verdicts[d.UUID]
	if !kept {
		return nil
	}
	select {
	case err := <-verdict:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// finish ends the wait of one delivery: nil acks it, an error nacks it.
func (g *gate) finish(uuid string, err error) { g.verdicts[uuid] <- err }
