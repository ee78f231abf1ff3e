package pgoutbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ParkedFilter picks rows among those that a consumer group parked. The zero value picks all of them; each field that is set
// narrows the choice.
type ParkedFilter struct {
	Topic  string    // of the consumer, as subscribed to; AllTopics is one. "" = every consumer of the group
	IDs    []int64   // of the rows; nil = any
	Keys   []string  // ordering keys; nil = any, rows without a key included
	Before time.Time // parked earlier, by the server's clock; zero = whenever
}

// Unpark has parked rows delivered again and returns how many it picked. The leaders of their shards, in whichever process, put them
// back before every newer row of their keys within about a second of their next tick, and they may be parked again. With ParkKey a
// key comes back as a whole, whichever of its rows were picked. A row that was deleted from the outbox meanwhile is dropped.
//
// It runs on the pool, outside any transaction of yours, and needs UPDATE on the table of parked rows. An error means that nothing
// was asked for, unless the answer was lost; asking again is safe. Nothing is lost on the way: a row leaves that table in the
// transaction that makes it pending.
func (s *Subscriber) Unpark(ctx context.Context, which ParkedFilter) (int, error) {
	return unpark(ctx, s.pool, s.names, s.group, which)
}

// Unpark is Subscriber.Unpark for the bridge's group. The bridge need not be running.
func (b *PublisherBridge) Unpark(ctx context.Context, which ParkedFilter) (int, error) {
	return unpark(ctx, b.pool, b.names, b.group, which)
}

func unpark(ctx context.Context, pool *pgxpool.Pool, n names, group string, which ParkedFilter) (int, error) {
	var topic, before any
	if which.Topic != "" {
		topic = which.Topic
	}
	if !which.Before.IsZero() {
		before = which.Before
	}
	tag, err := pool.Exec(ctx, n.query("ask_unpark"), pgx.QueryExecModeExec, group, topic, which.IDs, which.Keys, before)
	if err != nil {
		return 0, fmt.Errorf("pgoutbox: unpark: %w", err)
	}
	return int(tag.RowsAffected()), nil
}
