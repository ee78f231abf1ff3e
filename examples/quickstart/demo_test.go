package main

import (
	"bytes"
	"context"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// small is the demo in short, on the server that all tests share.
func small(t *testing.T, args ...string) (*demo, *bytes.Buffer) {
	t.Helper()
	dsn := pgserver.Shared(t).DSN()
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "dsn")
	t.Setenv("PGOUTBOX_TEST_DSN", dsn)
	var out bytes.Buffer
	d, err := parse(append([]string{"-rows", "900", "-writers", "4", "-rate", "900", "-duration", "10s"}, args...), &out, &out)
	if err != nil {
		t.Fatal(err, out.String())
	}
	d.hold = 300 * time.Millisecond
	return d, &out
}

func TestDemoIsFine(t *testing.T) {
	for _, args := range [][]string{nil, {"-bridge", "-backlog", "600"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			d, out := small(t, args...)
			if code := d.exitCode(t.Context(), out); code != exitFine {
				t.Errorf("exit code %d", code)
			}
			for _, line := range []string{
				`(?m)^lost +0$`, `(?m)^ghosts +0$`, `(?m)^out of order per key +0$`, `(?m)^take-over time +\d+\.\d\d s$`,
				`(?m)^forwarded +\d\d+$`, `pg_terminate_backend\(\d+\)`, `a new session leads`, `the open transaction has committed`,
			} {
				if !regexp.MustCompile(line).Match(out.Bytes()) {
					t.Errorf("nothing matches %s", line)
				}
			}
			if t.Failed() {
				t.Log(out)
			}
		})
	}
}

// TestBrokenRelayFailsTheDemo breaks what the library promises, behind its back, and expects the demo to notice.
func TestBrokenRelayFailsTheDemo(t *testing.T) {
	tests := []struct {
		name   string
		broken publishFunc
		want   string
	}{
		{"a message is acked and never published", dropOne(), `(?m)^lost +[1-9]`},
		{"a message is made up", inventOne(), `(?m)^ghosts +1$`},
		{"a message is acked before it is published", delayFirst(), `(?m)^out of order per key +[1-9]`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			d, out := small(t)
			d.patience = 2 * time.Second
			d.tamper = func(pub message.Publisher) message.Publisher { return &tampered{Publisher: pub, publish: test.broken} }
			if code := d.exitCode(t.Context(), out); code != exitFailed {
				t.Errorf("exit code %d", code)
			}
			if !regexp.MustCompile(test.want).Match(out.Bytes()) {
				t.Errorf("nothing matches %s\n%s", test.want, out)
			}
		})
	}
}

func TestInterruptStopsEverything(t *testing.T) {
	d, out := small(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	d.tamper = func(pub message.Publisher) message.Publisher {
		return &tampered{Publisher: pub, publish: func(pub message.Publisher, topic string, msg *message.Message) error {
			cancel()
			return pub.Publish(topic, msg)
		}}
	}
	if code := d.exitCode(ctx, out); code != exitInterrupted {
		t.Errorf("exit code %d\n%s", code, out)
	}
}

func TestFlagsAreChecked(t *testing.T) {
	for _, args := range [][]string{{"-rows", "0"}, {"-rate", "-1"}, {"-duration", "x"}, {"-nonsense"}, {"more"}} {
		var out bytes.Buffer
		if code := run(t.Context(), args, &out, &out); code != exitUsage || out.Len() == 0 {
			t.Errorf("%v: exit code %d, %q", args, code, out.String())
		}
	}
}

// tampered is a Publisher that does something else with each message.
type tampered struct {
	message.Publisher

	publish publishFunc
}

type publishFunc func(pub message.Publisher, topic string, msg *message.Message) error

func (p *tampered) Publish(topic string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := p.publish(p.Publisher, topic, msg); err != nil {
			return err
		}
	}
	return nil
}

func dropOne() publishFunc {
	var once sync.Once
	return func(pub message.Publisher, topic string, msg *message.Message) error {
		dropped := false
		once.Do(func() { dropped = true })
		if dropped {
			return nil
		}
		return pub.Publish(topic, msg)
	}
}

func inventOne() publishFunc {
	var once sync.Once
	return func(pub message.Publisher, topic string, msg *message.Message) error {
		once.Do(func() {
			o := order{ID: -1, Customer: 1, Number: 1}
			_ = pub.Publish(topic, o.message(context.Background(), topic)) // a failure shows: the ghost is missing
		})
		return pub.Publish(topic, msg)
	}
}

// delayFirst keeps the first order of each customer and publishes it after the second.
func delayFirst() publishFunc {
	var mu sync.Mutex
	kept := map[string]*message.Message{}
	return func(pub message.Publisher, topic string, msg *message.Message) error {
		if topic != topics[0] {
			return pub.Publish(topic, msg)
		}
		mu.Lock()
		defer mu.Unlock()
		key := msg.Metadata.Get(pgoutbox.OrderingKey)
		late, seen := kept[key]
		if !seen {
			kept[key] = msg.Copy()
			return nil
		}
		if err := pub.Publish(topic, msg); err != nil || late == nil {
			return err
		}
		kept[key] = nil
		return pub.Publish(topic, late)
	}
}
