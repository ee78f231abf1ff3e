package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Ordering is what a Subscriber keeps in order by waiting for acks: a Watermill Router handles each message in a goroutine of
// its own, so nothing else keeps order.
type Ordering int

const (
	// OrderByKey is the default: it has up to MaxInFlight messages of a shard un-acked, never two of one key. Rows without a key
	// are in no order.
	OrderByKey Ordering = iota
	// OrderByShard has one message of a shard un-acked. A nacked one holds the whole shard back.
	OrderByShard
)

// SubscriberConfig is what a Subscriber can be told. ConsumerGroup is required; the zero value of every other field is its
// default.
type SubscriberConfig struct {
	Schema, Table string // where the outbox is: public.outbox

	ConsumerGroup string        // required; processes with the same group share the work, one process per shard
	Shards        int           // 0 = as stored (16 for a new consumer); another number than the stored one is refused
	OnlyShards    []int         // nil = all; the shards that this process may lead
	StartFrom     StartPosition // where a new consumer starts: Earliest
	LiveOnly      bool          // start at now on every acquisition: what was written while nobody led is skipped

	Ordering    Ordering // OrderByKey
	MaxInFlight int      // un-acked messages per shard under OrderByKey: 64
	Window      int      // rows per shard that may be read and not acked, those behind a blocked key included: 10,000

	MaxAttempts int        // nacks of a message by one leader before its row is parked: 0 = never, it is delivered for ever
	ParkPolicy  ParkPolicy // ParkRow; ParkKey parks the rows behind it too

	PollInterval  time.Duration // between looks for rows when there were none: 100 ms
	RetryInterval time.Duration // between tries for shards that other processes lead: 500 ms, ±20 %
	Lease         time.Duration // how long a silent process may keep a shard: 10 s, at least 1 s
	SaveInterval  time.Duration // between saves of the position: 100 ms
	NackDelay     time.Duration // before a nacked message is delivered again: 100 ms, doubling; negative = 1 ms
	MaxNackDelay  time.Duration // where the doubling ends: 10 s
	CloseTimeout  time.Duration // what delivered messages get to finish in: 5 s; Close returns within it + 2 s
	StalledAfter  time.Duration // rows of a shard and no ack for so long is what Healthy complains about: 30 s

	// ReadPool leads to a hot standby of the same server, and rows are read there when it has replayed the log up to the last
	// tick: nil = never. Where it is late by more than 50 ms, away or promoted, the primary serves. Locks, ticks and positions
	// stay on the primary. The roles of both pools need EXECUTE on pg_control_system(). Subscribe refuses one that leads to
	// another database.
	ReadPool    *pgxpool.Pool
	LockConn    string // DSN of the lock session, "" = the pool's own
	LockBaseID  int64  // goes into the number of every advisory lock; processes of one group need the same
	AllowPooler bool   // the lock session may pass a pooler, which must be in session mode
	MaxLocks    int    // advisory locks that a Subscriber may claim in total: 4,096
}

// Subscriber is a Watermill Subscriber on the outbox, and a SubscribeInitializer. Each topic it subscribes to, or AllTopics, is
// a consumer with a position of its own, kept in the database under the group's name. Of the processes that subscribe, one
// leads each shard of a consumer and emits its rows; the others stand by.
//
// Every committed row is delivered at least once, rows of one key in causal order. A message is delivered again after a
// nack, and after a crash or a lost lease if it was not acked, or was acked since the last save. See the package
// documentation for what this rests on.
//
// It is safe for concurrent use. It never closes the pool, and holds none of its connections while a message is handled.
type Subscriber struct {
	settings

	pool   *pgxpool.Pool
	logger watermill.LoggerAdapter

	mu         sync.Mutex
	leadership *leadership
	claimed    int           // locks
	stopping   chan struct{} // closed by Stop
	closing    chan struct{} // closed by Close
	session    sync.WaitGroup
	endSession context.CancelFunc
	running    sync.WaitGroup
}

// NewSubscriber makes a Subscriber and checks its configuration, reporting every problem at once. It does not touch the
// database. The pool is used for reading rows; the locks are held on one further connection, opened with the pool's
// configuration and hooks (BeforeConnect, AfterConnect), or with LockConn. A nil logger is fine.
func NewSubscriber(pool *pgxpool.Pool, cfg SubscriberConfig, logger watermill.LoggerAdapter) (*Subscriber, error) {
	s, err := newSettings(pool, cfg)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: subscriber: %w", err)
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	logger = logger.With(watermill.LogFields{"consumer_group": cfg.ConsumerGroup, "table": s.names.quoted("")})
	out := &Subscriber{settings: s, pool: pool, logger: logger, stopping: make(chan struct{}), closing: make(chan struct{})}
	out.leadership = newLeadership(s.leadershipConfig(pool, logReporter{logger}))
	return out, nil
}

// Subscribe returns a channel of the messages of a topic, or of every topic with AllTopics. It returns without waiting for a
// shard; leading begins, and begins again after every loss, in the background. The channel stays open meanwhile. It closes
// after Close, or when ctx ends: emission stops at once, messages that were delivered have CloseTimeout to be acked, the
// position is saved and the shards are given up, then the channel closes.
//
// The contexts of messages carry the values of ctx but not its end, so that a Router's shutdown does not cut work short. They
// end when the message is acked or nacked, at the end of CloseTimeout, and at once, with cause ErrLeadershipLost, when
// another process may lead the shard.
//
// A first call checks the schema, the server and the grants for at most 5 s. What waiting does not mend is returned. A server
// that cannot be reached, is starting or in recovery is logged and tried again in the background. Two subscriptions of
// one topic in one process take turns like two processes. One that would exceed MaxLocks is refused; if the database could
// not tell how many shards it has, that is logged later, and it begins when others have ended.
func (s *Subscriber) Subscribe(ctx context.Context, topic string) (<-chan *message.Message, error) {
	if err := checkSubscribed(topic); err != nil {
		return nil, fmt.Errorf("pgoutbox: subscribe: %w", err)
	}
	found, err := s.consumer(ctx, topic)
	if err != nil && (isPermanent(err) || errors.Is(err, ErrClosed)) {
		return nil, fmt.Errorf("pgoutbox: subscribe: %w", err)
	}
	if err != nil && ctx.Err() == nil {
		s.logger.Error("the database is not ready, the subscription begins when it is", err, watermill.LogFields{"topic": topic})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isStopping() {
		return nil, ErrClosed
	}
	reserved := 0
	if found.id != 0 {
		if reserved, err = s.reserve(found); err != nil {
			return nil, fmt.Errorf("pgoutbox: subscribe: %w", err)
		}
	}
	out := make(chan *message.Message)
	s.running.Go(func() {
		defer close(out)
		s.serve(ctx, topic, found, out, func(found consumer) error { // how many shards it has was not known before
			s.mu.Lock()
			defer s.mu.Unlock()
			var err error
			reserved, err = s.reserve(found)
			return err
		})
		s.mu.Lock()
		defer s.mu.Unlock()
		s.claimed -= reserved
	})
	return out, nil
}

// reserve counts the locks of a consumer, if they are not too many. It is called with mu held.
func (s *Subscriber) reserve(found consumer) (int, error) {
	locks := len(s.shardsOf(found))
	if s.claimed+locks > s.maxLocks {
		return 0, fmt.Errorf("%d locks more than the %d claimed would exceed MaxLocks (%d); the lock table of the server "+
			"is shared by everybody, see max_locks_per_transaction", locks, s.claimed, s.maxLocks)
	}
	s.claimed += locks
	return locks, nil
}

// SubscribeInitialize creates the consumer of a topic, so that its position is fixed from now on, whether or not anybody
// subscribes. It changes nothing when the consumer exists, and is safe from many processes at once. An error, also that of
// a database that cannot be reached, means that the consumer may not exist.
func (s *Subscriber) SubscribeInitialize(topic string) error {
	if err := checkSubscribed(topic); err != nil {
		return fmt.Errorf("pgoutbox: initialize: %w", err)
	}
	if _, err := s.consumer(context.Background(), topic); err != nil {
		return fmt.Errorf("pgoutbox: initialize: %w", err)
	}
	return nil
}

// Stop ends emission for good and returns at once. Messages that were delivered can still be acked, which is saved; channels
// stay open until Close. It is idempotent.
func (s *Subscriber) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.isStopping() {
		close(s.stopping)
	}
	return nil
}

// Close stops emission, gives delivered messages CloseTimeout to be acked, saves the positions, frees every lock and closes
// the channels and the lock session. It returns within CloseTimeout + 2 s whatever the database does; what it could not free
// then, the server frees when it notices that the session is gone, after the lease at the latest. It is idempotent; every call returns when
// all is closed. The pool stays open.
func (s *Subscriber) Close() error {
	_ = s.Stop()
	s.mu.Lock()
	if !s.isClosing() {
		close(s.closing)
	}
	s.mu.Unlock()
	s.running.Wait()
	s.mu.Lock()
	if s.endSession != nil {
		s.endSession()
	}
	s.mu.Unlock()
	s.session.Wait()
	return nil
}

func (s *Subscriber) isStopping() bool { return isClosed(s.stopping) }
func (s *Subscriber) isClosing() bool  { return isClosed(s.closing) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func checkSubscribed(topic string) error {
	if topic == AllTopics {
		return nil
	}
	return checkTopic(topic)
}

const firstCallTimeout = 5 * time.Second

// consumer finds or creates the consumer of a topic, within the time of a first call.
func (s *Subscriber) consumer(ctx context.Context, topic string) (consumer, error) {
	s.mu.Lock()
	if s.isStopping() {
		s.mu.Unlock()
		return consumer{}, ErrClosed
	}
	if s.endSession == nil {
		var session context.Context
		session, s.endSession = context.WithCancel(context.Background())
		s.session.Go(func() { s.leadership.run(session) })
	}
	s.running.Add(1)
	s.mu.Unlock()
	defer s.running.Done()
	ctx, cancel := context.WithTimeoutCause(ctx, firstCallTimeout, errors.New("no answer within 5 s"))
	defer cancel()
	return s.findConsumer(ctx, s.leadership, topic)
}

// serve emits the messages of a topic until ctx ends or the Subscriber closes. A consumer that was not found is looked for, and
// reserve asked.
func (s *Subscriber) serve(
	ctx context.Context, topic string, found consumer, out chan<- *message.Message, reserve func(consumer) error,
) {
	logger := s.logger.With(watermill.LogFields{"topic": topic})
	feed := &feed{
		settings: s.settings, pool: s.pool, leadership: s.leadership, logger: logger, topic: topic,
		stop: s.stopping, close: s.closing, reserve: reserve,
		reader: readerConfig{
			ordering: s.ordering, outMost: s.maxInFlight,
			staffMost: func(shards int) int { return shards * s.maxInFlight },
			runMost:   func(int, int) int { return 1 },
		},
	}
	feed.sink = func(r *reader) func([]*flight) {
		return func(run []*flight) { deliver(r, run[0], out, logger) }
	}
	feed.run(ctx, found)
}

// deliver sends one message and waits for its ack.
func deliver(r *reader, f *flight, out chan<- *message.Message, logger watermill.LoggerAdapter) {
	msg, err := f.message()
	if err != nil {
		logger.Error("a row cannot be made a message", err, nil)
		r.failed(f, err, true)
		return
	}
	ctx, cancel := f.context()
	defer cancel()
	msg.SetContext(ctx)
	if !f.shard.trusted() { // a process that was paused must find out here, not after the message is gone
		r.abandoned(f)
		return
	}
	select {
	case out <- msg:
	case <-r.stopping:
		r.abandoned(f)
		return
	case <-f.shard.context.Done():
		r.abandoned(f)
		return
	}
	select {
	case <-msg.Acked():
		r.settled(f)
	case <-msg.Nacked():
		r.failed(f, reported(ctx), true)
	case <-f.shard.context.Done():
		r.abandoned(f)
	}
}
