// Package bridge tests the PublisherBridge on a real server, against a broker that the tests have in hand.
package bridge

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return &outbox{outboxtest.New(t)}
}

// put inserts rows "key/1" to "key/n" for each key, the keys side by side; a key changes its topic every four rows.
func (db *outbox) put(keys, n int) (uuids []string) {
	db.Helper()
	db.Exec(`
		INSERT INTO outbox (topic, key, uuid)
		SELECT 'topic ' || (i / 4 + k) % 3, 'key ' || k, 'key ' || k || '/' || i
		FROM generate_series(1, $2::int) AS i, generate_series(1, $1::int) AS k
		ORDER BY i, k`, keys, n)
	for i := range n {
		for k := range keys {
			uuids = append(uuids, fmt.Sprintf("key %d/%d", k+1, i+1))
		}
	}
	return uuids
}

// call is one call of Publish.
type call struct {
	topic string
	rows  []pgoutbox.Row
	uuids []string
	msgs  []*message.Message
}

// broker is a Publisher that keeps what it accepted, and finds fault with how it is called.
type broker struct {
	db *outbox
	// accept decides how many messages of a call get out, from the first on, and what Publish returns; nil: all of them.
	accept func(call) (int, error)

	mu       sync.Mutex
	got      []pgoutbox.Row   // accepted, in order
	uuids    []string         // theirs
	ids      []string         // and their MessageIDs
	first    map[string]bool  // accepted before, by uuid
	last     map[string]int64 // id of the last first acceptance, by key
	out      map[string]bool  // keys that are in a call now
	seen     map[*message.Message]bool
	running  int
	most     int // calls at a time
	calls    int
	failures int
	more     chan struct{}
}

func newBroker(db *outbox) *broker {
	return &broker{
		db: db, first: map[string]bool{}, last: map[string]int64{}, out: map[string]bool{}, seen: map[*message.Message]bool{},
		more: make(chan struct{}),
	}
}

// Publish checks the promises of a bridge that hold for every call.
func (b *broker) Publish(topic string, messages ...*message.Message) error {
	c := call{topic: topic, msgs: messages}
	keys := map[string]bool{}
	for _, msg := range messages {
		row, ok := pgoutbox.RowFromContext(msg.Context())
		if !ok {
			b.db.Errorf("%s has no row in its context", msg.UUID)
		}
		c.rows, c.uuids = append(c.rows, row), append(c.uuids, msg.UUID)
		if row.Key != "" {
			keys[row.Key] = true
		}
	}
	b.enter(c, keys)
	n, err := len(messages), error(nil)
	if b.accept != nil {
		n, err = b.accept(c)
	}
	b.leave(c, keys, n, err)
	return err
}

func (b *broker) enter(c call, keys map[string]bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running++
	b.most = max(b.most, b.running)
	b.calls++
	if len(c.msgs) == 0 {
		b.db.Error("a call without messages")
	}
	for _, msg := range c.msgs {
		if b.seen[msg] {
			b.db.Errorf("the message object of %s comes a second time", msg.UUID)
		}
		b.seen[msg] = true
	}
	for key := range keys {
		if b.out[key] {
			b.db.Errorf("two calls at once carry %s", key)
		}
		b.out[key] = true
	}
	b.wake()
}

func (b *broker) leave(c call, keys map[string]bool, n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running--
	if err != nil {
		b.failures++
	}
	for key := range keys {
		delete(b.out, key)
	}
	for i, row := range c.rows[:n] {
		uuid := c.uuids[i]
		b.got, b.uuids = append(b.got, row), append(b.uuids, uuid)
		b.ids = append(b.ids, pgoutbox.MessageID(c.msgs[i].Context()))
		if b.first[uuid] {
			continue
		}
		b.first[uuid] = true
		if row.Key != "" && row.ID < b.last[row.Key] {
			b.db.Errorf("%s (row %d) came after row %d of its key", uuid, row.ID, b.last[row.Key])
		}
		b.last[row.Key] = row.ID
	}
	b.wake()
}

func (b *broker) wake() {
	close(b.more)
	b.more = make(chan struct{})
}

// Close must not be called: the publisher is not the bridge's.
func (b *broker) Close() error {
	b.db.Error("the publisher was closed")
	return nil
}

// wait blocks until a condition on what the broker has seen holds. It is called with the lock held.
func (b *broker) wait(what string, held func() bool) {
	b.db.Helper()
	late := time.After(outboxtest.Patience)
	for {
		b.mu.Lock()
		ok, more := held(), b.more
		b.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-more:
		case <-late:
			b.mu.Lock()
			defer b.mu.Unlock()
			b.db.Fatalf("never happened: %s; %d calls, %d failed, %d rows", what, b.calls, b.failures, len(b.first))
		}
	}
}

// until waits for the acceptance of each row.
func (b *broker) until(uuids ...string) {
	b.db.Helper()
	b.wait(fmt.Sprintf("%d rows come", len(uuids)), func() bool {
		return !slices.ContainsFunc(uuids, func(uuid string) bool { return !b.first[uuid] })
	})
}

// accepted returns how often each row was accepted.
func (b *broker) accepted() map[string]int {
	b.mu.Lock()
	defer b.mu.Unlock()
	times := map[string]int{}
	for _, uuid := range b.uuids {
		times[uuid]++
	}
	return times
}

// once fails unless exactly these rows were accepted, once each.
func (b *broker) once(uuids ...string) {
	b.db.Helper()
	b.until(uuids...)
	times := b.accepted()
	for _, uuid := range uuids {
		if times[uuid] != 1 {
			b.db.Errorf("%s came %d times", uuid, times[uuid])
		}
		delete(times, uuid)
	}
	for uuid := range times {
		b.db.Errorf("%s was not to come", uuid)
	}
}

// running is a bridge that runs.
type running struct {
	*pgoutbox.PublisherBridge
	*outboxtest.Running

	log *outboxtest.Log
}

func config() pgoutbox.BridgeConfig {
	return pgoutbox.BridgeConfig{
		ConsumerGroup: "test", PollInterval: 5 * time.Millisecond, RetryInterval: 50 * time.Millisecond,
		SaveInterval: 5 * time.Millisecond, NackDelay: -1, MaxNackDelay: 20 * time.Millisecond,
	}
}

// start runs a bridge until stop, or the test's end.
func (db *outbox) start(b message.Publisher, cfg pgoutbox.BridgeConfig) *running {
	db.Helper()
	r := &running{log: outboxtest.NewLog(db)}
	var err error
	r.PublisherBridge, err = pgoutbox.NewPublisherBridge(db.Pool, b, cfg, r.log)
	db.Must(err)
	r.Running = outboxtest.Run(db, r.Run)
	return r
}

var errDown = errors.New("the broker is down")
