package parking

import (
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

// picky is a destination that takes everything but what it refuses.
type picky struct {
	outboxtest.Sink

	mu      sync.Mutex
	refuses map[string]error // by UUID
	tries   map[string]int   // of rows that came alone
}

func (p *picky) refuse(err error, uuids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuses == nil {
		p.refuses, p.tries = map[string]error{}, map[string]int{}
	}
	for _, uuid := range uuids {
		p.refuses[uuid] = err
	}
}

func (p *picky) Publish(_ string, messages ...*message.Message) error {
	p.mu.Lock()
	for _, msg := range messages {
		if err := p.refuses[msg.UUID]; err != nil {
			if len(messages) == 1 {
				p.tries[msg.UUID]++
			}
			p.mu.Unlock()
			return fmt.Errorf("%w: %s", err, msg.Payload)
		}
	}
	p.mu.Unlock()
	for _, msg := range messages {
		p.Add(outboxtest.Received("bridge", msg))
	}
	return nil
}

func (p *picky) alone(uuid string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.tries[uuid]
}

func (*picky) Close() error { return nil }

var errTooLarge = errors.New("too large")

func bridge(t *testing.T, db *outboxtest.Outbox, pub message.Publisher, log *outboxtest.Log, cfg pgoutbox.BridgeConfig) *pgoutbox.PublisherBridge {
	t.Helper()
	cfg.ConsumerGroup, cfg.NackDelay, cfg.PollInterval = "group", 5*time.Millisecond, 20*time.Millisecond
	b, err := pgoutbox.NewPublisherBridge(db.Pool, pub, cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// keyed inserts n rows of a key, in one statement, and returns their UUIDs.
func keyed(db *outboxtest.Outbox, key string, from, n int) []string {
	var uuids []string
	for i := range n {
		uuids = append(uuids, fmt.Sprintf("%s/%d", key, from+i))
	}
	db.Exec(`INSERT INTO outbox (topic, key, uuid, payload)
		SELECT 'orders', nullif($1, ''), uuid, convert_to('payload of ' || uuid, 'UTF8') FROM unnest($2::text[]) WITH ORDINALITY AS u (uuid, n) ORDER BY n`, key, uuids)
	return uuids
}

func parkedUUIDs(db *outboxtest.Outbox) []string {
	return strings.Fields(db.Text("SELECT coalesce(string_agg(uuid, ' ' ORDER BY id), '') FROM outbox_parked JOIN outbox ON id = row_id"))
}

func (p *picky) orderOf(key string) []string {
	var out []string
	for _, d := range p.All() {
		if d.Key == key {
			out = append(out, d.UUID)
		}
	}
	return out
}

func TestRowIsParkedAfterMaxAttemptsByItself(t *testing.T) {
	db, log := outboxtest.New(t), outboxtest.NewLog(t)
	pub := &picky{}
	pub.refuse(errTooLarge, "b/2")
	uuids := slices.Concat(keyed(db, "a", 1, 40), keyed(db, "b", 1, 3), keyed(db, "c", 1, 40))
	outboxtest.Run(t, bridge(t, db, pub, log, pgoutbox.BridgeConfig{MaxAttempts: 3}).Run)
	pub.Until(t, outboxtest.Patience, slices.DeleteFunc(uuids, func(u string) bool { return u == "b/2" })...)
	db.Eventually("b/2 is parked", "SELECT count(*) = 1 FROM outbox_parked")
	if got := pub.alone("b/2"); got != 3 {
		t.Errorf("it was tried %d times by itself, want 3", got)
	}
	row := db.Text(`SELECT concat_ws(' ', uuid, attempts, whole_key, p.key, first_failed_at <= parked_at, last_error)
		FROM outbox_parked AS p JOIN outbox ON id = row_id`)
	if want := "b/2 3 f b t too large: [payload]"; row != want {
		t.Errorf("parked %q, want %q", row, want)
	}
	log.Until(t, "a row was parked")
	if lines := log.Lines("payload of"); len(lines) > 0 {
		t.Errorf("the payload was logged: %v", lines)
	}
}

func TestUnparkedKeyComesBackInOrder(t *testing.T) {
	for _, policy := range []pgoutbox.ParkPolicy{pgoutbox.ParkRow, pgoutbox.ParkKey} {
		t.Run(fmt.Sprint(policy), func(t *testing.T) {
			db, log := outboxtest.New(t), outboxtest.NewLog(t)
			pub := &picky{}
			pub.refuse(fmt.Errorf("%w: never", pgoutbox.ErrPermanent), "b/1")
			b := bridge(t, db, pub, log, pgoutbox.BridgeConfig{ParkPolicy: policy, BatchSize: 1})
			run := outboxtest.Run(t, b.Run)
			rest := keyed(db, "b", 1, 900)[1:]
			others := keyed(db, "a", 1, 100)
			pub.Until(t, outboxtest.Patience, others...)
			if policy == pgoutbox.ParkRow {
				pub.Until(t, outboxtest.Patience, rest...)
				if got := parkedUUIDs(db); !slices.Equal(got, []string{"b/1"}) {
					t.Fatalf("parked are %v", got)
				}
			} else {
				db.Eventually("the key is parked", "SELECT count(*) = 900 FROM outbox_parked")
				run.End() // the key stays parked whoever leads
				run = outboxtest.Run(t, b.Run)
				keyed(db, "b", 901, 10)
				db.Eventually("what came later too", "SELECT count(*) = 910 FROM outbox_parked")
				if got := pub.orderOf("b"); len(got) > 0 {
					t.Fatalf("of the parked key came %v", got)
				}
			}
			pub.refuse(nil, "b/1")
			n, err := b.Unpark(t.Context(), pgoutbox.ParkedFilter{Keys: []string{"b"}})
			db.Must(err)
			last := keyed(db, "b", 1000, 5)
			pub.Until(t, outboxtest.Patience, append(last, "b/1")...)
			db.Eventually("nothing is parked", "SELECT count(*) = 0 FROM outbox_parked")
			got := pub.orderOf("b")
			if policy == pgoutbox.ParkRow {
				if n != 1 || len(got) != 905 {
					t.Errorf("%d picked, %d rows of the key came, want 1 and 905", n, len(got))
				}
				return
			}
			if n != 910 || len(got) != 915 || !slices.IsSortedFunc(got, func(a, b string) int { return number(a) - number(b) }) {
				t.Errorf("%d picked, then came %v", n, got)
			}
			run.End()
		})
	}
}

func number(uuid string) int {
	var n int
	_, _ = fmt.Sscanf(uuid, "b/%d", &n)
	return n
}
