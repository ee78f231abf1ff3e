package bridge

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// Rows of one key keep their order also where they go to different topics, and never travel side by side.
func TestOrderOfAKeyHoldsAcrossTopics(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	rows := db.put(20, 30)
	db.start(b, config())
	rows = append(rows, db.put2("more ", 20, 20)...)
	b.once(rows...)
}

// put2 is put in transactions of their own, with another name for the keys.
func (db *outbox) put2(prefix string, keys, n int) (uuids []string) {
	db.Helper()
	for i := range n {
		db.Exec(`
			INSERT INTO outbox (topic, key, uuid)
			SELECT 'topic ' || ($3 + k) % 3, $1 || k, $1 || k || '/' || $3
			FROM generate_series(1, $2::int) AS k`, prefix, keys, i)
		for k := range keys {
			uuids = append(uuids, fmt.Sprintf("%s%d/%d", prefix, k+1, i))
		}
	}
	return uuids
}

func TestCallsHaveOneTopicAndABatchAtMost(t *testing.T) {
	t.Parallel()
	for _, size := range []int{1, 7, 100} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			b := newBroker(db)
			rows := db.put(200, 3)
			largest := 0
			b.accept = func(c call) (int, error) {
				b.mu.Lock()
				defer b.mu.Unlock()
				largest = max(largest, len(c.rows))
				for _, row := range c.rows {
					if row.Topic != c.topic {
						t.Errorf("a row of %q goes to %q", row.Topic, c.topic)
					}
				}
				return len(c.rows), nil
			}
			cfg := config()
			cfg.BatchSize, cfg.Lanes = size, 2
			db.start(b, cfg)
			b.once(rows...)
			b.mu.Lock()
			defer b.mu.Unlock()
			if largest > size || (size > 1 && largest == 1) {
				t.Errorf("the largest call had %d rows, BatchSize is %d", largest, size)
			}
		})
	}
}

// Lanes publish at the same time: each call waits here until all of them are in.
func TestLanesPublishSideBySide(t *testing.T) {
	t.Parallel()
	for _, lanes := range []int{1, 8, 64} {
		t.Run(fmt.Sprint(lanes), func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			b := newBroker(db)
			rows := db.put(300, 1)
			all := make(chan struct{})
			var once sync.Once
			b.accept = func(c call) (int, error) {
				b.mu.Lock()
				if b.running == lanes {
					once.Do(func() { close(all) })
				}
				b.mu.Unlock()
				outboxtest.Next(t, fmt.Sprintf("%d calls at once", lanes), all)
				return len(c.rows), nil
			}
			cfg := config()
			cfg.Lanes = lanes
			db.start(b, cfg)
			b.once(rows...)
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.most != lanes {
				t.Errorf("%d calls at once, Lanes is %d", b.most, lanes)
			}
		})
	}
}

// A call that fails may have sent any part of its messages: their first deliveries stay in the order of their keys, and none
// is lost.
func TestPartialFailuresInvertNothing(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	const failures = 150
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(1, 2))
	b.accept = func(c call) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		b.mu.Lock()
		enough := b.failures >= failures
		b.mu.Unlock()
		if enough || random.IntN(3) == 0 {
			return len(c.rows), nil
		}
		return random.IntN(len(c.rows) + 1), errDown
	}
	cfg := config()
	cfg.Lanes, cfg.BatchSize, cfg.MaxNackDelay = 4, 10, 2*time.Millisecond
	rows := db.put(6, 100)
	db.start(b, cfg)
	b.until(rows...)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failures < 100 {
		t.Errorf("only %d calls failed", b.failures)
	}
}

// A row that nobody takes holds back its own key and nothing else; when it is taken at last, its key goes on in order.
func TestBadRowBlocksItsOwnKey(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	healed, tries := false, 0
	b.accept = func(c call) (int, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for i, uuid := range c.uuids {
			if uuid == "key 3/2" && !healed {
				tries++
				return i, errDown
			}
		}
		return len(c.rows), nil
	}
	all := db.put(10, 20)
	db.start(b, config())
	var others []string
	for _, uuid := range all {
		if !strings.HasPrefix(uuid, "key 3/") || uuid == "key 3/1" {
			others = append(others, uuid)
		}
	}
	b.until(others...)
	b.wait("the bad row is tried again and again", func() bool { return tries >= 5 })
	for i := 2; i <= 20; i++ {
		if uuid := fmt.Sprintf("key 3/%d", i); b.accepted()[uuid] > 0 {
			t.Errorf("%s overtook the bad row", uuid)
		}
	}
	more := db.put2("later ", 5, 3) // and new rows pass
	b.until(more...)
	b.mu.Lock()
	healed = true
	b.mu.Unlock()
	b.until(all...)
}

// TopicFunc decides where a row goes. What it cannot decide is logged and blocks its key.
func TestTopicFuncRoutes(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	var mu sync.Mutex
	undecided, asked := true, 0
	cfg := config()
	cfg.TopicFunc = func(row pgoutbox.Row) (string, error) {
		mu.Lock()
		defer mu.Unlock()
		if row.Key == "key 2" && undecided {
			asked++
			return "", errors.New("no destination")
		}
		return "for " + row.Key, nil
	}
	b.accept = func(c call) (int, error) {
		for _, row := range c.rows {
			if c.topic != "for "+row.Key {
				t.Errorf("a row of %q went to %q", row.Key, c.topic)
			}
		}
		return len(c.rows), nil
	}
	all := db.put(4, 5)
	r := db.start(b, cfg)
	var others []string
	for _, uuid := range all {
		if !strings.HasPrefix(uuid, "key 2/") {
			others = append(others, uuid)
		}
	}
	b.once(others...)
	for ok := false; !ok; {
		select {
		case <-time.After(time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("it is not asked again")
		}
		mu.Lock()
		ok = asked >= 3
		undecided = !ok
		mu.Unlock()
	}
	b.once(all...)
	if !strings.Contains(r.log.String(), "no destination") {
		t.Errorf("the log does not say why a row waits:\n%s", r.log)
	}
}

func TestTopicSelectsRows(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	db.Exec("INSERT INTO outbox (topic, uuid) VALUES ('a', 'a 1'), ('b', 'b 1'), ('a', 'a 2')")
	cfg := config()
	cfg.Topic = "a"
	db.start(b, cfg)
	b.once("a 1", "a 2")
}

// Run ends after the calls that were running, whose rows are saved: the next one begins where it ended.
func TestRunEndsAfterItsCalls(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	rows := db.put(50, 4)
	first := newBroker(db)
	release := make(chan struct{})
	first.accept = func(c call) (int, error) {
		outboxtest.Next(t, "the release", release)
		if err := c.msgs[0].Context().Err(); err != nil {
			t.Errorf("a call that is given time to finish has lost its context: %v", err)
		}
		return len(c.rows), nil
	}
	cfg := config()
	cfg.Lanes, cfg.BatchSize, cfg.CloseTimeout = 4, 5, outboxtest.Patience
	r := db.start(first, cfg)
	first.wait("four calls", func() bool { return first.running == 4 })
	r.Stop()
	select {
	case <-r.Done():
		t.Fatal("Run returned while calls were running")
	case <-time.After(100 * time.Millisecond):
	}
	close(release)
	r.Ended()
	taken := first.accepted()
	if len(taken) == 0 || len(taken) >= len(rows) || first.calls != 4 {
		t.Fatalf("%d of %d rows in %d calls", len(taken), len(rows), first.calls)
	}
	second := newBroker(db)
	db.start(second, cfg)
	var rest []string
	for _, uuid := range rows {
		if taken[uuid] == 0 {
			rest = append(rest, uuid)
		}
	}
	second.once(rest...)
	for uuid, n := range taken {
		if n > 1 {
			t.Errorf("%s came %d times", uuid, n)
		}
	}
}

// A call that does not finish within CloseTimeout learns it by its messages' contexts; its rows come again.
func TestCloseTimeoutEndsTheContextsOfCalls(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	rows := db.put(1, 2)
	slow := newBroker(db)
	slow.accept = func(c call) (int, error) {
		ctx := c.msgs[0].Context()
		outboxtest.Next(t, "the context ends", ctx.Done())
		if cause := context.Cause(ctx); !errors.Is(cause, pgoutbox.ErrClosed) {
			t.Errorf("the context ended with %v", cause)
		}
		return 0, ctx.Err()
	}
	cfg := config()
	cfg.CloseTimeout = 50 * time.Millisecond
	r := db.start(slow, cfg)
	slow.wait("a call", func() bool { return slow.running == 1 })
	stopped := time.Now()
	r.End()
	if took := time.Since(stopped); took > cfg.CloseTimeout+2*time.Second {
		t.Errorf("Run took %v to end", took)
	}
	b := newBroker(db)
	db.start(b, cfg)
	b.once(rows...)
}

// A Publisher that never returns, whatever its messages' contexts say, does not keep Run; its rows come again.
func TestPublisherThatHangsDoesNotKeepRun(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	rows := db.put(3, 2)
	hung := newBroker(db)
	release := make(chan struct{})
	hung.accept = func(call) (int, error) {
		<-release
		return 0, errDown
	}
	cfg := config()
	cfg.CloseTimeout = 50 * time.Millisecond
	r := db.start(hung, cfg)
	hung.wait("three calls", func() bool { return hung.running == 3 })
	stopped := time.Now()
	r.End()
	if took := time.Since(stopped); took > cfg.CloseTimeout+2*time.Second {
		t.Errorf("Run took %v to end", took)
	}
	b := newBroker(db)
	db.start(b, cfg)
	b.once(rows...)
	close(release)
	hung.wait("the calls return at last", func() bool { return hung.running == 0 })
}

// What a Publisher does to a message is not there when the row is published again; the row's identity is.
func TestRetryHasAMessageOfItsOwn(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	const attempts = 4
	ids := map[string]bool{}
	b.accept = func(c call) (int, error) {
		msg, row := c.msgs[0], c.rows[0]
		if string(msg.Payload) != "payload" || len(msg.Metadata) != 2 || msg.Metadata["a"] != "b" || msg.Metadata[pgoutbox.OrderingKey] != "k" || msg.UUID != "row" {
			t.Errorf("attempt %d gets %q %v %q", row.Attempt, msg.UUID, msg.Metadata, msg.Payload)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		ids[pgoutbox.MessageID(msg.Context())] = true
		if row.Attempt != b.calls {
			t.Errorf("call %d says it is attempt %d", b.calls, row.Attempt)
		}
		copy(msg.Payload, "changed")
		msg.Payload = append(msg.Payload, "more"...)
		msg.Metadata["a"], msg.Metadata["c"] = "changed", "d"
		msg.UUID = "changed"
		if b.calls < attempts {
			return 0, errDown
		}
		return 1, nil
	}
	db.Exec(`INSERT INTO outbox (topic, key, uuid, metadata, payload) VALUES ('t', 'k', 'row', '{"a": "b"}', 'payload')`)
	db.start(b, config())
	b.until("row")
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(ids) != 1 || ids[""] {
		t.Errorf("the row has identities %v", ids)
	}
}

// Row and MessageID are in the context of each message, and tell rows with one UUID apart.
func TestContextTellsTheRow(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	db.Exec(`INSERT INTO outbox (topic, key, uuid) VALUES ('t', 'k', 'same'), ('t', 'k', 'same'), ('t', NULL, 'same')`)
	cfg := config()
	cfg.Shards = 4
	db.start(b, cfg)
	b.wait("three rows", func() bool { return len(b.got) == 3 })
	b.mu.Lock()
	defer b.mu.Unlock()
	ids := map[string]bool{}
	for i, row := range b.got {
		ids[b.ids[i]] = true
		var shard int
		var key string
		var created time.Time
		err := db.Pool.QueryRow(t.Context(), "SELECT slot % 4, coalesce(key, ''), created_at FROM outbox WHERE id = $1", row.ID).Scan(&shard, &key, &created)
		if err != nil || row.Shard != shard || row.Key != key || !row.CreatedAt.Equal(created) || row.Topic != "t" || row.Term != 1 || row.Attempt != 1 {
			t.Errorf("%+v, %v; shard %d, key %q, created at %v", row, err, shard, key, created)
		}
	}
	if len(ids) != 3 || ids[""] {
		t.Errorf("three rows have the identities %v", ids)
	}
}

func TestSecondRunIsRefused(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	rows := db.put(1, 1)
	r := db.start(b, config())
	b.once(rows...)
	second, cancelSecond := context.WithTimeout(t.Context(), outboxtest.Patience/8) // ends it if it is not refused
	defer cancelSecond()
	if err := r.Run(second); err == nil || !strings.Contains(err.Error(), "running already") {
		t.Errorf("a second Run returned %v", err)
	}
	r.End()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }() // after the first has ended it may run again
	more := db.put2("again ", 1, 1)
	b.once(append(rows, more...)...)
	cancel()
	if err := outboxtest.Next(t, "Run returns", done); err != nil {
		t.Error(err)
	}
}

// While the broker takes nothing, it is not hammered, whatever is waiting; afterwards nothing is missing.
func TestBrokerThatIsDownIsNotHammered(t *testing.T) {
	t.Parallel()
	const lanes, outage = 16, 2 * time.Second
	db := newOutbox(t)
	b := newBroker(db)
	var start time.Time
	var end sync.Once
	down := 0
	up := make(chan struct{})
	b.accept = func(c call) (int, error) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if start.IsZero() {
			start = time.Now()
		}
		if time.Since(start) < outage {
			down++
			return 0, errDown
		}
		end.Do(func() { close(up) })
		return len(c.rows), nil
	}
	cfg := config()
	cfg.Lanes, cfg.NackDelay, cfg.MaxNackDelay = lanes, 100*time.Millisecond, time.Second
	rows := db.put(300, 5)
	db.start(b, cfg)
	outboxtest.Next(t, "the broker is up again", up)
	b.once(rows...)
	b.mu.Lock()
	defer b.mu.Unlock()
	// Each lane waits before a run of rows: not at all twice, then for 100, 200, 400 and 800 ms, with jitter. A run makes a call
	// for each of the topics.
	if most := lanes * 8 * 3; down > most {
		t.Errorf("%d calls in %v by %d lanes, want at most %d", down, outage, lanes, most)
	}
	t.Logf("%d calls while the broker was down", down)
}

// A call that is running when the lock is lost learns it by its messages' contexts, and its rows come again.
func TestLostLeadEndsTheContextsOfCalls(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	causes := make(chan error, 1)
	var blocked *message.Message
	b.accept = func(c call) (int, error) {
		b.mu.Lock()
		first := blocked == nil
		if first {
			blocked = c.msgs[0]
		}
		b.mu.Unlock()
		if first {
			ctx := c.msgs[0].Context()
			outboxtest.Next(t, "the context ends", ctx.Done())
			causes <- context.Cause(ctx)
			return 0, ctx.Err()
		}
		return len(c.rows), nil
	}
	rows := db.put(1, 3)
	r := db.start(b, config())
	b.wait("a call", func() bool { return b.running == 1 })
	db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'")
	if cause := outboxtest.Next(t, "the call ends", causes); !errors.Is(cause, pgoutbox.ErrLeadershipLost) {
		t.Errorf("the context ended with %v", cause)
	}
	b.once(rows...)
	r.End()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, row := range b.got {
		if row.Term != 2 {
			t.Errorf("row %d came in term %d", row.ID, row.Term)
		}
	}
}

func TestConstructorReportsEveryProblem(t *testing.T) {
	t.Parallel()
	_, err := pgoutbox.NewPublisherBridge(nil, nil, pgoutbox.BridgeConfig{Lanes: -1, BatchSize: -1, Table: strings.Repeat("x", 70)}, nil)
	if err == nil {
		t.Fatal("it was accepted")
	}
	for _, problem := range []string{"ConsumerGroup", "pool", "publisher", "Lanes", "BatchSize", "Table"} {
		if !strings.Contains(err.Error(), problem) {
			t.Errorf("%v does not name %s", err, problem)
		}
	}
}

// A Publisher that panics has failed like one that returns an error: the process and every other row live on.
func TestPanicOfAPublisherIsAFailure(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	b := newBroker(db)
	pub := &panicker{broker: b, left: 2}
	db.Exec(`INSERT INTO outbox (topic, key, uuid) VALUES ('t', 'k', 'row')`)
	db.start(pub, config())
	b.until("row")
	if pub.left != 0 {
		t.Errorf("the row came through with %d panics to go", pub.left)
	}
}

type panicker struct {
	*broker

	left int
}

func (p *panicker) Publish(topic string, messages ...*message.Message) error {
	if p.left > 0 {
		p.left--
		panic(errDown)
	}
	return p.broker.Publish(topic, messages...)
}
