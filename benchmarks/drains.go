package main

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// limitMessages is the least that any reader must do: select the rows in pages and make messages of them.
func limitMessages(ctx context.Context, pool *pgxpool.Pool, l load) error {
	var last int64
	for read := 0; read < l.rows; {
		rows, err := pool.Query(ctx, `
			SELECT id, topic, key, uuid, metadata::text, payload
			FROM outbox WHERE id > $1 ORDER BY id LIMIT 1000`, last)
		if err != nil {
			return err
		}
		var topic, key, uuid, metadata string
		var payload []byte
		page := 0
		_, err = pgx.ForEachRow(rows, []any{&last, &topic, &key, &uuid, &metadata, &payload}, func() error {
			msg := message.NewMessage(uuid, append([]byte(nil), payload...))
			page++
			return json.Unmarshal([]byte(metadata), &msg.Metadata)
		})
		if err != nil {
			return err
		}
		if page == 0 {
			return errors.New("rows are missing")
		}
		read += page
	}
	return nil
}

// sinkhole is a Publisher that counts.
type sinkhole struct {
	left atomic.Int64
	done context.CancelFunc
}

func (s *sinkhole) Publish(_ string, messages ...*message.Message) error {
	if s.left.Add(-int64(len(messages))) == 0 {
		s.done()
	}
	return nil
}

func (s *sinkhole) Close() error { return nil }

func bridge(ctx context.Context, pool *pgxpool.Pool, l load) error {
	ctx, done := context.WithCancel(ctx)
	defer done()
	sink := &sinkhole{done: done}
	sink.left.Store(int64(l.rows))
	b, err := pgoutbox.NewPublisherBridge(pool, sink, pgoutbox.BridgeConfig{ConsumerGroup: "bench", Shards: l.shards}, nil)
	if err != nil {
		return err
	}
	return b.Run(ctx)
}

func channel(ctx context.Context, pool *pgxpool.Pool, l load) error {
	sub, err := subscriber(pool, l)
	if err != nil {
		return err
	}
	messages, err := sub.Subscribe(ctx, pgoutbox.AllTopics)
	if err != nil {
		return err
	}
	for range l.rows {
		msg, ok := <-messages
		if !ok {
			break
		}
		msg.Ack()
	}
	return errors.Join(sub.Close(), ctx.Err())
}

func router(ctx context.Context, pool *pgxpool.Pool, l load) error {
	ctx, done := context.WithCancel(ctx)
	defer done()
	sub, err := subscriber(pool, l)
	if err != nil {
		return err
	}
	r, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	var left atomic.Int64
	left.Store(int64(l.rows))
	r.AddConsumerHandler("bench", pgoutbox.AllTopics, sub, func(*message.Message) error {
		if left.Add(-1) == 0 {
			done()
		}
		return nil
	})
	return errors.Join(r.Run(ctx), sub.Close()) // a Router that ends with its context leaves the Subscriber open
}

func subscriber(pool *pgxpool.Pool, l load) (*pgoutbox.Subscriber, error) {
	return pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: "bench", Shards: l.shards}, nil)
}
