package cases_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// refusing is a broker that refuses the first message of each round once, together with what comes in the same call before or
// after it, or takes those all the same: both happen to a batch.
type refusing struct {
	takesRest bool

	mu      sync.Mutex
	refused map[string]bool
	taken   []string // in their order, each the first time
}

func (b *refusing) Publish(_ string, messages ...*message.Message) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, msg := range messages {
		if strings.HasSuffix(msg.UUID, " 1") && !b.refused[msg.UUID] {
			b.refused[msg.UUID] = true
			if !b.takesRest {
				return errors.New("refused")
			}
			b.take(slices.DeleteFunc(slices.Clone(messages), func(m *message.Message) bool { return m == msg }))
			return errors.New("refused one of several")
		}
	}
	b.take(messages)
	return nil
}

func (b *refusing) take(messages []*message.Message) {
	for _, msg := range messages {
		if !slices.Contains(b.taken, msg.UUID) {
			b.taken = append(b.taken, msg.UUID)
		}
	}
}

func (*refusing) Close() error { return nil }

func (b *refusing) has(n int) (bool, string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.taken) >= n, fmt.Sprintf("%d of %d messages were taken", len(b.taken), n)
}

// FC-50: the first of three messages of one key is refused once. A broker that refuses a call as a whole, or gets the messages one
// by one from a Router, sees 1, 2, 3. One that takes a part of a refused call has broken the order itself, unless it is given one
// message of a key at a time: BatchSize 1.
func TestFC50_PartialFailureKeepsTheOrderOfAKey(t *testing.T) {
	t.Parallel()
	rounds := outboxtest.Rounds(100)
	bridge := func(b *refusing, batch int) func(*testing.T, *outbox) {
		return func(t *testing.T, ob *outbox) {
			br, err := pgoutbox.NewPublisherBridge(ob.Pool, b, pgoutbox.BridgeConfig{ConsumerGroup: "bridge", BatchSize: batch}, nil)
			must(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- br.Run(ctx) }()
			t.Cleanup(func() {
				cancel()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		}
	}
	for _, tt := range []struct {
		name   string
		broker *refusing
		batch  int // 0: a Subscriber
	}{
		{"bridge, the call is refused", &refusing{}, 100},
		{"bridge one by one, the rest is taken", &refusing{takesRest: true}, 1},
		{"subscriber", &refusing{takesRest: true}, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ob, b := newOutbox(t), tt.broker
			b.refused = map[string]bool{}
			var want [][]string
			for n := range rounds {
				key := fmt.Sprintf("key %d", n)
				uuids := []string{key + " 1", key + " 2", key + " 3"}
				ob.put(t, key, uuids...)
				want = append(want, uuids)
			}
			if tt.batch > 0 {
				bridge(b, tt.batch)(t, ob)
			} else {
				ob.read(t, "reader", newSink(), func(_ context.Context, d delivery) error { return b.Publish("", d.msg) })
			}
			outboxtest.Eventually(t, 30*time.Second, "everything is taken", func() (bool, string) { return b.has(3 * rounds) })
			b.mu.Lock()
			defer b.mu.Unlock()
			if len(b.refused) != rounds {
				t.Errorf("%d messages were refused, not %d", len(b.refused), rounds)
			}
			for n, uuids := range want {
				var got []string
				for _, uuid := range b.taken {
					if strings.HasPrefix(uuid, fmt.Sprintf("key %d ", n)) {
						got = append(got, uuid)
					}
				}
				if !slices.Equal(got, uuids) {
					t.Errorf("first taken: %q", got)
				}
			}
		})
	}
}
