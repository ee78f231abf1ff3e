package pgoutbox_test

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// The README shows the bodies of these; a test in examples/readme compares them.

func ExampleNewSubscriber() {
	relay := func(ctx context.Context, pool *pgxpool.Pool, pub message.Publisher, logger watermill.LoggerAdapter) error {
		sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: "relay"}, logger)
		if err != nil {
			return err
		}
		defer func() { _ = sub.Close() }() // a Router that ends with its context leaves it open
		router, err := message.NewRouter(message.RouterConfig{}, logger)
		if err != nil {
			return err
		}
		router.AddHandler("relay", pgoutbox.AllTopics, sub, "", pgoutbox.RouteByTopic(pub), message.PassthroughHandler)
		return router.Run(ctx)
	}
	_ = relay
}

func ExampleRowFromContext() {
	handle := func(router *message.Router, sub *pgoutbox.Subscriber) {
		router.AddConsumerHandler("mailer", "orders", sub, func(msg *message.Message) error {
			row, _ := pgoutbox.RowFromContext(msg.Context())
			fmt.Printf("row %d of key %s, attempt %d: %s\n", row.ID, row.Key, row.Attempt, msg.Payload)
			return nil // an error delivers it again, after a growing delay; its key waits, others go on
		})
	}
	_ = handle
}

func ExamplePublisher_WithTx() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, outbox *pgoutbox.Publisher, order string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE orders SET paid = true WHERE id = $1", order); err != nil {
				return err
			}
			msg := message.NewMessageWithContext(ctx, watermill.NewUUID(), []byte(`{"paid": true}`))
			msg.Metadata.Set(pgoutbox.OrderingKey, order)
			return outbox.WithTx(tx).Publish("payments", msg)
		})
	}
	_ = pay
}

func ExamplePublisher_WithStdTx() {
	pay := func(ctx context.Context, db *sql.DB, outbox *pgoutbox.Publisher, order string, msg *message.Message) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() // does nothing after Commit
		if _, err := tx.ExecContext(ctx, "UPDATE orders SET paid = true WHERE id = $1", order); err != nil {
			return err
		}
		if err := outbox.WithStdTx(tx).Publish("payments", msg); err != nil {
			return err
		}
		return tx.Commit()
	}
	_ = pay
}

func ExampleContextWithTx() {
	// One Publisher for the whole program, for instance inside a cqrs.EventBus. It joins the transaction that it finds in the
	// context of the message.
	pay := func(ctx context.Context, pool *pgxpool.Pool, outbox *pgoutbox.Publisher, msg *message.Message) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			msg.SetContext(pgoutbox.ContextWithTx(ctx, tx))
			return outbox.Publish("payments", msg)
		})
	}
	_ = pay
}

func ExampleNewPublisherBridge() {
	relay := func(ctx context.Context, pool *pgxpool.Pool, pub message.Publisher, logger watermill.LoggerAdapter) error {
		bridge, err := pgoutbox.NewPublisherBridge(pool, pub, pgoutbox.BridgeConfig{ConsumerGroup: "relay"}, logger)
		if err != nil {
			return err
		}
		return bridge.Run(ctx) // until ctx ends; it never closes pub
	}
	_ = relay
}

func ExampleRouteByTopicFunc() {
	perRegion := func(pub message.Publisher, region string) message.Publisher {
		return pgoutbox.RouteByTopicFunc(pub, func(row pgoutbox.Row) (string, error) { return region + "." + row.Topic, nil })
	}
	_ = perRegion
}
