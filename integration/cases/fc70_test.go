package cases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

const attempts = 3

type contextKey struct{}

// spoiler changes whatever it can of each message and refuses the first attempts.
type spoiler struct {
	t    *testing.T
	want map[string]*message.Message

	mu       sync.Mutex
	attempts map[string]int
	seen     map[*message.Message]bool
	done     chan string
}

// judge compares a message with what was published, then spoils it. It reports whether this was the last attempt.
func (s *spoiler) judge(msg *message.Message) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attempts[msg.UUID]++
	n, want := s.attempts[msg.UUID], s.want[msg.UUID]
	if want == nil {
		s.t.Errorf("%q was never published", msg.UUID)
		return nil
	}
	if !bytes.Equal(msg.Payload, want.Payload) {
		s.t.Errorf("BYTES: attempt %d of %q has another payload than was published", n, msg.UUID)
	}
	if !maps.Equal(msg.Metadata, want.Metadata) {
		s.t.Errorf("BYTES: attempt %d of %q has metadata %v, published was %v", n, msg.UUID, msg.Metadata, want.Metadata)
	}
	if s.seen[msg] {
		s.t.Errorf("attempt %d of %q is the same message as one before", n, msg.UUID)
	}
	s.seen[msg] = true
	select {
	case <-msg.Acked():
		s.t.Errorf("attempt %d of %q comes acked", n, msg.UUID)
	case <-msg.Nacked():
		s.t.Errorf("attempt %d of %q comes nacked", n, msg.UUID)
	default:
	}
	if msg.Context().Err() != nil || msg.Context().Value(contextKey{}) != nil {
		s.t.Errorf("attempt %d of %q comes with the context of the one before", n, msg.UUID)
	}
	if row, ok := pgoutbox.RowFromContext(msg.Context()); !ok || row.Attempt != n {
		s.t.Errorf("attempt %d of %q says of itself %+v, %t", n, msg.UUID, row, ok)
	}

	for i := range msg.Payload {
		msg.Payload[i] ^= 0xff
	}
	msg.Payload = append(msg.Payload[:0], "spoilt"...)
	clear(msg.Metadata)
	msg.Metadata.Set("spoilt", "yes")
	msg.SetContext(context.WithValue(context.Background(), contextKey{}, "spoilt"))
	if n < attempts {
		return errors.New("refused")
	}
	s.done <- msg.UUID
	return nil
}

// Publish makes the spoiler a destination.
func (s *spoiler) Publish(_ string, messages ...*message.Message) error {
	var refused error
	for _, msg := range messages {
		refused = errors.Join(refused, s.judge(msg))
	}
	return refused
}

func (*spoiler) Close() error { return nil }

// FC-70: a handler changes its message and nacks it. The next attempt gets the row as it is stored.
func TestFC70_EachAttemptIsAFreshCopy(t *testing.T) {
	t.Parallel()
	t.Run("Subscriber", func(t *testing.T) {
		t.Parallel()
		ob := newOutbox(t)
		s := newSpoiler(t, ob)
		r := ob.read(t, "P1", newSink(), func(_ context.Context, d delivery) error { return s.judge(d.msg) })
		s.await()
		r.close(t)
	})
	t.Run("bridge", func(t *testing.T) {
		t.Parallel()
		ob := newOutbox(t)
		s := newSpoiler(t, ob)
		bridge, err := pgoutbox.NewPublisherBridge(ob.Pool, s, pgoutbox.BridgeConfig{ConsumerGroup: "group", Topic: outboxtest.Topic, BatchSize: 1}, nil)
		must(t, err)
		end := runs(t, bridge.Run)
		s.await()
		end()
	})
}

// newSpoiler publishes what it will judge: payloads of all sizes, with and without a key.
func newSpoiler(t *testing.T, ob *outbox) *spoiler {
	s := &spoiler{
		t: t, want: map[string]*message.Message{}, attempts: map[string]int{}, seen: map[*message.Message]bool{},
		done: make(chan string, 100),
	}
	for _, size := range []int{0, 1, 1000, 100_000} {
		for _, key := range []string{"", "key"} {
			msg := message.NewMessage(fmt.Sprintf("size %d, key %q", size, key), []byte(strings.Repeat("\x00\xffa", size)[:size]))
			msg.Metadata.Set("size", fmt.Sprint(size))
			if key != "" {
				msg.Metadata.Set(pgoutbox.OrderingKey, fmt.Sprint(key, size))
			}
			s.want[msg.UUID] = msg
			must(t, ob.Pub.Publish(outboxtest.Topic, msg))
		}
	}
	return s
}

func (s *spoiler) await() {
	s.t.Helper()
	for n := range s.want {
		select {
		case <-s.done:
		case <-time.After(15 * time.Second):
			s.t.Fatalf("%q and others did not get to attempt %d", n, attempts)
		}
	}
}
