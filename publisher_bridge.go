package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

// BridgeConfig is what a PublisherBridge can be told. ConsumerGroup is required; the zero value of every other field is its
// default. Fields that a Subscriber has too mean the same.
type BridgeConfig struct {
	Schema, Table string // where the outbox is: public.outbox

	ConsumerGroup string        // required; processes with the same group share the work, one process per shard
	Shards        int           // 0 = as stored (16 for a new consumer); another number than the stored one is refused
	OnlyShards    []int         // nil = all; the shards that this process may lead
	StartFrom     StartPosition // where a new consumer starts: Earliest
	LiveOnly      bool          // start at now on every acquisition: what was written while nobody led is skipped

	Topic     string                    // which rows: "" = AllTopics
	TopicFunc func(Row) (string, error) // where a row goes: by default to the topic it was published to
	Lanes     int                       // concurrent calls of Publish: 64
	BatchSize int                       // messages in one call of Publish, of one topic: 100
	Window    int                       // rows per shard that may be read and not published, those behind a failed one included: 10,000

	MaxAttempts int        // failures of a row by itself, with one leader, before it is parked: 0 = never, it is published for ever
	ParkPolicy  ParkPolicy // ParkRow; ParkKey parks the rows behind it too

	PollInterval  time.Duration // between looks for rows when there were none: 100 ms
	RetryInterval time.Duration // between tries for shards that other processes lead: 500 ms, ±20 %
	Lease         time.Duration // how long a silent process may keep a shard: 10 s, at least 1 s
	SaveInterval  time.Duration // between saves of the position: 100 ms
	NackDelay     time.Duration // before a failed row is published again: 100 ms, doubling; negative = 1 ms
	MaxNackDelay  time.Duration // where the doubling ends: 10 s
	CloseTimeout  time.Duration // what running calls of Publish get to finish in: 5 s; Run returns within it + 2 s
	StalledAfter  time.Duration // rows of a shard and none published for so long is what Healthy complains about: 30 s

	ReadPool    *pgxpool.Pool // a hot standby that rows are read from while it is at hand: see SubscriberConfig
	LockConn    string        // DSN of the lock session, "" = the pool's own
	LockBaseID  int64         // goes into the number of every advisory lock; processes of one group need the same
	AllowPooler bool          // the lock session may pass a pooler, which must be in session mode
}

// PublisherBridge publishes committed outbox rows straight into a message.Publisher, without a Router. No official Watermill
// publisher sends batches, so it calls Publish from many lanes at once: each call carries rows of one topic, in order, and
// no two calls carry rows of one key. The position follows what was published.
//
// Every committed row is published at least once, rows of one key in causal order. A call that fails is repeated row by row,
// after a growing delay, so one bad row holds back its own key and nothing else; how many of its messages had gone out is
// unknown, so they may go out twice, first deliveries still in order. MessageID of a message's context is the same each
// time, for brokers that can tell copies apart.
type PublisherBridge struct {
	settings

	pool      *pgxpool.Pool
	pub       message.Publisher
	topic     string
	topicFunc func(Row) (string, error)
	lanes     int
	batchSize int
	logger    watermill.LoggerAdapter
	running   atomic.Bool
	leads     atomic.Pointer[leadership] // while it runs
}

// NewPublisherBridge makes a PublisherBridge and checks its configuration, reporting every problem at once. It touches neither
// the database nor pub, which it never closes. A nil logger is fine.
func NewPublisherBridge(pool *pgxpool.Pool, pub message.Publisher, cfg BridgeConfig, logger watermill.LoggerAdapter) (*PublisherBridge, error) {
	s, err := newSettings(pool, SubscriberConfig{
		Schema: cfg.Schema, Table: cfg.Table, ConsumerGroup: cfg.ConsumerGroup, Shards: cfg.Shards, OnlyShards: cfg.OnlyShards,
		StartFrom: cfg.StartFrom, LiveOnly: cfg.LiveOnly, Window: cfg.Window, PollInterval: cfg.PollInterval,
		RetryInterval: cfg.RetryInterval, Lease: cfg.Lease, SaveInterval: cfg.SaveInterval, NackDelay: cfg.NackDelay,
		MaxNackDelay: cfg.MaxNackDelay, CloseTimeout: cfg.CloseTimeout, ReadPool: cfg.ReadPool, LockConn: cfg.LockConn,
		LockBaseID: cfg.LockBaseID, AllowPooler: cfg.AllowPooler, MaxAttempts: cfg.MaxAttempts, ParkPolicy: cfg.ParkPolicy,
		StalledAfter: cfg.StalledAfter,
	})
	problems := []error{err}
	if isNil(pub) {
		problems = append(problems, errors.New("the publisher is nil"))
	}
	if cfg.Topic == "" {
		cfg.Topic = AllTopics
	}
	if err := checkSubscribed(cfg.Topic); err != nil {
		problems = append(problems, fmt.Errorf("%s: %w", "Topic", err))
	}
	if cfg.Lanes < 0 {
		problems = append(problems, fmt.Errorf("%s is negative", "Lanes"))
	}
	if cfg.BatchSize < 0 {
		problems = append(problems, fmt.Errorf("%s is negative", "BatchSize"))
	}
	if err := errors.Join(problems...); err != nil {
		return nil, fmt.Errorf("pgoutbox: bridge: %w", err)
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	if cfg.TopicFunc == nil {
		cfg.TopicFunc = func(row Row) (string, error) { return row.Topic, nil }
	}
	return &PublisherBridge{
		settings: s, pool: pool, pub: pub, topic: cfg.Topic, topicFunc: cfg.TopicFunc,
		lanes: orDefault(cfg.Lanes, 64), batchSize: orDefault(cfg.BatchSize, 100),
		logger: logger.With(watermill.LogFields{"consumer_group": cfg.ConsumerGroup, "topic": cfg.Topic, "table": s.names.quoted("")}),
	}, nil
}

// Run publishes until ctx ends, and then returns nil: calls of Publish that are running get CloseTimeout to finish, the position
// is saved, the locks are freed. It survives every error of the database and of the publisher, which it logs.
//
// It returns an error at once when waiting would not help: the schema, a grant, the server's version or a setting is wrong, or
// the bridge is running already. Nothing was published then.
func (b *PublisherBridge) Run(ctx context.Context) error {
	if b.running.Swap(true) {
		return errors.New("pgoutbox: bridge: it is running already")
	}
	defer b.running.Store(false)
	// The session outlives ctx: the last position is stored on it.
	session, endSession := context.WithCancel(context.WithoutCancel(ctx))
	leadership := newLeadership(b.leadershipConfig(b.pool, logReporter{b.logger}))
	b.leads.Store(leadership)
	defer b.leads.Store(nil)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		leadership.run(session)
	}()
	defer func() {
		endSession()
		<-ended
	}()
	first, cancel := context.WithTimeoutCause(ctx, firstCallTimeout, errors.New("no answer within 5 s"))
	defer cancel()
	found, err := b.findConsumer(first, leadership, b.topic)
	switch {
	case isPermanent(err):
		return fmt.Errorf("pgoutbox: bridge: %w", err)
	case err != nil:
		b.logger.Error("the database is not ready, the bridge begins when it is", err, nil)
	}
	feed := &feed{
		settings: b.settings, pool: b.pool, leadership: leadership, logger: b.logger, topic: b.topic,
		reader: readerConfig{
			outMost:   b.window,
			staffMost: func(int) int { return b.lanes },
			runMost: func(ready, shards int) int {
				return min(max((ready*shards+b.lanes-1)/b.lanes, 1), b.batchSize)
			},
		},
		sink: func(r *reader) func([]*flight) { return newLanes(b, r).publish },
	}
	feed.run(ctx, found)
	return nil
}

// lanes publishes runs of rows. A run never shares a key with another, so runs need no order among themselves.
type lanes struct {
	bridge   *PublisherBridge
	reader   *reader
	failures atomic.Int32 // calls that failed since the last that did not
}

func newLanes(b *PublisherBridge, r *reader) *lanes { return &lanes{bridge: b, reader: r} }

// publish sends a run: one call for each destination, or for each stretch of one destination where rows of one key follow
// each other.
func (l *lanes) publish(run []*flight) {
	if !l.pause(run[0].shard.context) {
		l.abandon(run)
		return
	}
	failed := map[*entry]bool{} // rows that were not published, by themselves or through the row before them
	var calls []call
	for _, f := range run {
		if failed[f.prev] {
			failed[f.entry] = true
			l.repeat(f, failed, nil, false)
			continue
		}
		c, err := l.prepare(f)
		if err != nil {
			l.bridge.logger.Error("a row was not published", err, watermill.LogFields{"row": f.id, "attempt": f.entry.attempt})
			failed[f.entry] = true
			l.repeat(f, failed, err, true)
			continue
		}
		calls = append(calls, c)
	}
	if !slices.ContainsFunc(calls, func(c call) bool { return c.flight.prev != nil }) {
		slices.SortStableFunc(calls, func(a, b call) int { return strings.Compare(a.topic, b.topic) })
	}
	for len(calls) > 0 {
		n := 1
		for n < len(calls) && calls[n].topic == calls[0].topic {
			n++
		}
		l.call(calls[:n], failed)
		calls = calls[n:]
	}
}

// call is one row on its way to its destination.
type call struct {
	flight *flight
	topic  string
	msg    *message.Message
	cancel context.CancelFunc
}

func (l *lanes) prepare(f *flight) (call, error) {
	row := f.row()
	topic, err := l.bridge.topicFunc(row)
	if err != nil {
		return call{}, fmt.Errorf("destination of row %d: %w", f.id, err)
	}
	msg, err := f.message()
	if err != nil {
		return call{}, err
	}
	ctx, cancel := f.context()
	msg.SetContext(ctx)
	return call{flight: f, topic: topic, msg: msg, cancel: cancel}, nil
}

// call publishes rows of one destination, and settles them.
func (l *lanes) call(calls []call, failed map[*entry]bool) {
	messages := make([]*message.Message, 0, len(calls))
	for _, c := range calls {
		defer c.cancel()
		if failed[c.flight.prev] {
			failed[c.flight.entry] = true
			l.repeat(c.flight, failed, nil, false)
			continue
		}
		messages = append(messages, c.msg)
	}
	if len(messages) == 0 {
		return
	}
	// A process that was paused must find out here, not after the messages are gone; one that stops begins no further call.
	if !calls[0].flight.shard.trusted() || isClosed(l.reader.stopping) {
		for _, c := range calls {
			if !failed[c.flight.entry] {
				l.reader.abandoned(c.flight)
			}
		}
		return
	}
	err := l.send(calls[0].topic, messages)
	if err == nil {
		l.failures.Store(0)
	} else {
		l.failures.Add(1)
		l.bridge.logger.Error("rows were not published, they are published again one by one", err, watermill.LogFields{
			"destination": calls[0].topic, "first_row": calls[0].flight.id, "rows": len(messages), "attempt": calls[0].flight.entry.attempt,
		})
	}
	for _, c := range calls {
		switch {
		case failed[c.flight.entry]:
		case err == nil:
			l.reader.settled(c.flight)
		default:
			failed[c.flight.entry] = true
			l.repeat(c.flight, failed, err, len(messages) == 1)
		}
	}
}

// send calls Publish. A Publisher that panics has failed; what it panicked with may hold a payload, so only its type is told.
func (l *lanes) send(topic string, messages []*message.Message) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("the publisher panicked with a %T", p)
		}
	}()
	return redacted(l.bridge.pub.Publish(topic, messages...), messages...)
}

// repeat has a row published again: behind the row of its key that failed before it, or by itself after a delay. alone says that
// the failure was this row's and no other's.
func (l *lanes) repeat(f *flight, failed map[*entry]bool, err error, alone bool) {
	if failed[f.prev] {
		l.reader.returned(f)
		return
	}
	l.reader.failed(f, err, alone)
}

// pause keeps a lane from hammering a destination that takes nothing. One bad row among good ones does not make it wait.
func (l *lanes) pause(ctx context.Context) bool {
	n := int(l.failures.Load())
	if n < 2 {
		return true
	}
	timer := time.NewTimer(l.reader.backOff(1 + n/l.bridge.lanes))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.reader.stopping:
		return false
	case <-ctx.Done():
		return false
	}
}

func (l *lanes) abandon(run []*flight) {
	for _, f := range run {
		l.reader.abandoned(f)
	}
}
