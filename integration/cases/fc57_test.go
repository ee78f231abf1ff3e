package cases_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// broker is a destination that logs what is published to it, and adds to the metadata, as publishers do that trace.
type broker struct {
	mu  sync.Mutex
	got map[string]*message.Message
	ran chan struct{} // one for each message
}

func newBroker() *broker {
	return &broker{got: map[string]*message.Message{}, ran: make(chan struct{}, 100)}
}

func (b *broker) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		msg.Metadata.Set("trace", "of "+msg.UUID) // panics on a nil map
		b.mu.Lock()
		b.got[msg.UUID] = msg
		b.mu.Unlock()
		b.ran <- struct{}{}
	}
	return nil
}

func (*broker) Close() error { return nil }

// FC-57: metadata and payload that are nil or empty, written by whomever, reach handlers and publishers as something that can
// be added to.
func TestFC57_NilMetadataAndPayloadReachHandlers(t *testing.T) {
	t.Parallel()
	readers := map[string]func(*testing.T, *outbox, *broker) (end func()){
		"Router": func(t *testing.T, ob *outbox, b *broker) func() {
			r := ob.reader(t)
			router, err := message.NewRouter(message.RouterConfig{}, r.log)
			must(t, err)
			router.AddHandler("forward", outboxtest.Topic, r.sub, "", pgoutbox.RouteByTopic(b), func(msg *message.Message) ([]*message.Message, error) {
				defer func() {
					if p := recover(); p != nil {
						t.Errorf("the handler of %q panicked: %v", msg.UUID, p)
					}
				}()
				msg.Metadata.Set("handled", "yes")
				return []*message.Message{msg}, nil
			})
			end := runs(t, router.Run)
			return func() {
				end()
				r.close(t) // a Router whose context ends need not close its subscribers
			}
		},
		"bridge": func(t *testing.T, ob *outbox, b *broker) func() {
			bridge, err := pgoutbox.NewPublisherBridge(ob.Pool, b, pgoutbox.BridgeConfig{ConsumerGroup: "group", Topic: outboxtest.Topic}, outboxtest.NewLog(t))
			must(t, err)
			return runs(t, bridge.Run)
		},
	}
	for name, run := range readers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ob, b := newOutbox(t), newBroker()
			want := publishNothing(t, ob)
			end := run(t, ob, b)
			for range want {
				select {
				case <-b.ran:
				case <-time.After(15 * time.Second):
					t.Fatalf("not all of %d messages were forwarded", len(want))
				}
			}
			end()
			for uuid, length := range want {
				msg := b.got[uuid]
				if msg == nil {
					t.Errorf("%q was not forwarded", uuid)
					continue
				}
				if len(msg.Payload) != length {
					t.Errorf("%q came with %d bytes, %d were published", uuid, len(msg.Payload), length)
				}
				if name == "Router" && msg.Metadata.Get("handled") != "yes" {
					t.Errorf("%q lost what the handler added: %v", uuid, msg.Metadata)
				}
			}
			ob.MustBeClean()
		})
	}
}

// publishNothing publishes each combination of metadata and payload, and returns the lengths of the payloads.
func publishNothing(t *testing.T, ob *outbox) map[string]int {
	metadata := map[string]message.Metadata{"nil": nil, "empty": {}, "some": {"a": "b"}}
	payloads := map[string]message.Payload{"nil": nil, "empty": {}, "some": []byte("x")}
	want := map[string]int{}
	for m, meta := range metadata {
		for p, payload := range payloads {
			uuid := fmt.Sprintf("metadata %s, payload %s", m, p)
			must(t, ob.Pub.Publish(outboxtest.Topic, &message.Message{UUID: uuid, Metadata: meta, Payload: payload}))
			want[uuid] = len(payload)
		}
	}
	ob.Exec("INSERT INTO outbox (topic, uuid) VALUES ($1, 'plain SQL')", outboxtest.Topic)
	want["plain SQL"] = 0
	return want
}

// runs starts run and returns what ends it and waits for it.
func runs(t *testing.T, run func(context.Context) error) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }() // waited for by end, which the end of the test calls in any case
	var once sync.Once
	end = func() {
		once.Do(func() {
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("Run: %v", err)
			}
		})
	}
	t.Cleanup(end)
	return end
}
