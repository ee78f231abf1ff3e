package pgoutbox

import (
	"database/sql"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// AllTopics subscribes to every topic. Publishing to it is refused.
	AllTopics = "#"

	// OrderingKey is the metadata entry that holds the ordering key: rows of one key are delivered in order.
	OrderingKey = "ordering_key"
)

// PublisherConfig configures a Publisher. The zero value writes to public.outbox, keyed by the metadata entry OrderingKey.
type PublisherConfig struct {
	Schema string // "" = public
	Table  string // "" = outbox

	// Key returns the ordering key of a message, "" for none: messages without a key have no order among each other. Nil
	// = the metadata entry OrderingKey. It only fills the key column, the message is stored as it is. It is called from
	// Publish, so at the same time from as many goroutines as Publish is.
	Key func(topic string, msg *message.Message) string
}

// Publisher stores messages in the outbox: they are delivered if, and only if, the transaction that they are part of commits.
//
// That transaction is the one the Publisher was bound to with WithTx or WithStdTx; else the one in the messages' contexts,
// see ContextWithTx; else one of its own, on the pool. It is safe for concurrent use, but a transaction is not: give each
// goroutine its own. It holds no resources between calls.
type Publisher struct {
	pool    *pgxpool.Pool // nil: transactions only
	bound   *target       // nil: see carriedTarget
	names   names
	publish string // the statement
	key     func(string, *message.Message) string
	logger  watermill.LoggerAdapter
	closed  *atomic.Bool // shared with the copies that WithTx makes
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a Publisher that writes through pool when there is no transaction. The pool stays the caller's; it may
// have any of pgx's five exec modes and lead through PgBouncer in transaction mode. With a nil pool, a Publish without a
// transaction returns ErrNoTransaction: what you want when every message belongs to a business transaction. A nil logger
// is fine. It does no I/O; its error tells about every wrong name.
func NewPublisher(pool *pgxpool.Pool, cfg PublisherConfig, logger watermill.LoggerAdapter) (*Publisher, error) {
	n, err := newNames(cfg.Schema, cfg.Table)
	if err != nil {
		return nil, fmt.Errorf("pgoutbox: publisher config: %w", err)
	}
	if cfg.Key == nil {
		cfg.Key = keyFromMetadata
	}
	if logger == nil {
		logger = watermill.NopLogger{}
	}
	return &Publisher{
		pool:    pool,
		names:   n,
		publish: n.query("publish"),
		key:     cfg.Key,
		logger:  logger,
		closed:  new(atomic.Bool),
	}, nil
}

func keyFromMetadata(_ string, msg *message.Message) string {
	return msg.Metadata[OrderingKey]
}

// WithTx returns a Publisher that writes into tx, whatever the messages' contexts carry: naming a transaction is more than
// finding one, and the two may well differ and both be right, as a savepoint (a pgx.Tx of its own) and its outer transaction
// do. Its Close does nothing, so code that closes its publishers may have it; it is closed when p is. It costs nothing,
// make one for each transaction. A nil tx makes every Publish fail.
func (p *Publisher) WithTx(tx Execer) *Publisher {
	return p.bind(target{execer: tx})
}

// WithStdTx is WithTx for a transaction of database/sql (with pgx's driver, lib/pq or bun's), and for what is built on it.
func (p *Publisher) WithStdTx(tx *sql.Tx) *Publisher {
	return p.bind(target{std: tx, isStd: true})
}

func (p *Publisher) bind(t target) *Publisher {
	bound := *p
	bound.bound = &t
	return &bound
}

// Publish stores the messages, all or none, in one statement however many they are. Their row ids, and so the order of
// messages with one key, follow the order of the arguments. None at all is fine and sends nothing.
//
// A message may have any UUID, empty and repeated ones included, a nil payload, and nil metadata. The contexts of all messages
// are honoured: when one ends, so does Publish; values are the first message's. The messages are not kept or changed.
//
// Nothing is sent, so that your transaction stays usable, when Publish returns ErrClosed or ErrNoTransaction, and when it
// refuses its arguments: a topic that is empty or AllTopics; a NUL byte or invalid UTF-8 in topic, key, UUID or metadata;
// a nil message or transaction; messages with different transactions, or only some with one; a context that has ended;
// more than about 1 GiB at once (half of that through database/sql).
//
// Any other error comes from the database. Within a transaction, roll back to your savepoint or roll back; nothing is tried
// again. A context that ends while the statement runs costs a pgx transaction its connection. Without a transaction nothing
// was stored, unless the error wraps ErrUnknownOutcome.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if p.closed.Load() {
		return ErrClosed
	}
	if len(messages) == 0 {
		return nil
	}
	err := p.store(topic, messages)
	switch {
	case err == nil:
		p.logger.Trace("Stored messages in the outbox", watermill.LogFields{"topic": topic, "messages": len(messages)})
		return nil
	case errors.Is(err, ErrNoTransaction):
		return err
	}
	return fmt.Errorf("pgoutbox: publish: %w", err)
}

func (p *Publisher) store(topic string, messages []*message.Message) error {
	rows, err := newInsert(topic, messages, p.key)
	if err != nil {
		return err
	}
	t, err := p.target(messages)
	if err != nil {
		return err
	}
	if err := rows.checkSize(t.isStd, maxStatement); err != nil {
		return err
	}
	ctx, release, err := joinContexts(messages)
	if err != nil {
		return err
	}
	defer release()
	if err := t.run(ctx, p.publish, rows); err != nil {
		return p.names.explain(withCause(ctx, err), len(messages))
	}
	return nil
}

func (p *Publisher) target(messages []*message.Message) (target, error) {
	if p.bound != nil {
		return *p.bound, p.bound.check()
	}
	t, carried, err := carriedTarget(messages)
	switch {
	case err != nil:
		return target{}, err
	case carried:
		return t, t.check()
	case p.pool == nil:
		return target{}, ErrNoTransaction
	}
	return target{execer: p.pool}, nil
}

// Close makes every later Publish return ErrClosed, on the copies that WithTx and WithStdTx made, too. It does not wait for calls
// that are under way, which finish as usual, and leaves pool and transactions alone. It may be called more than once and at
// any time; on a copy made by WithTx or WithStdTx it does nothing. It always returns nil.
func (p *Publisher) Close() error {
	if p.bound == nil {
		p.closed.Store(true)
	}
	return nil
}
