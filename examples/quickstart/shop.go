package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// topics that an order sends a message to, in this order.
var topics = []string{"orders", "payments", "shipments"}

// order is a row of the business table, and the payload of its messages.
type order struct {
	ID       int64 `json:"order"`
	Customer int64 `json:"customer"`
	Number   int64 `json:"number"` // of the customer's orders: 1, 2, 3 … in the order in which they commit
}

func (o order) uuid(topic string) string { return topic + "-" + strconv.FormatInt(o.ID, 10) }

func (o order) message(ctx context.Context, topic string) *message.Message {
	payload, _ := json.Marshal(o) //nolint:errchkjson // three numbers
	msg := message.NewMessageWithContext(ctx, o.uuid(topic), payload)
	msg.Metadata.Set(pgoutbox.OrderingKey, strconv.FormatInt(o.Customer, 10))
	return msg
}

// shop is the application: it takes orders.
type shop struct {
	pool  *pgxpool.Pool
	pub   *pgoutbox.Publisher
	meter *meter
}

const (
	customers       = 200
	patientCustomer = 0 // whose transaction stays open: nobody else orders for it, so nobody waits for its lock
)

const shopSchema = `
CREATE TABLE customers (
	id     bigint PRIMARY KEY,
	orders bigint NOT NULL DEFAULT 0
);
CREATE TABLE orders (
	id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	customer bigint NOT NULL REFERENCES customers,
	number   bigint NOT NULL,
	UNIQUE (customer, number)
);
CREATE TABLE visits (at timestamptz NOT NULL DEFAULT now());
INSERT INTO customers SELECT generate_series(0, %d - 1);`

func openShop(ctx context.Context, pool *pgxpool.Pool) (*shop, error) {
	if _, err := pool.Exec(ctx, fmt.Sprintf(shopSchema, customers)); err != nil {
		return nil, fmt.Errorf("create the shop: %w", err)
	}
	if err := pgoutbox.Migrate(ctx, pool, pgoutbox.SchemaConfig{}); err != nil {
		return nil, err
	}
	// Without a pool it refuses what is not part of a transaction.
	pub, err := pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		return nil, err
	}
	return &shop{pool: pool, pub: pub, meter: newMeter()}, nil
}

// place writes one order for each customer, and its messages, into tx. The customers' rows are locked before the messages are
// published, which is what gives the messages of a customer their order.
func (s *shop) place(ctx context.Context, tx pgx.Tx, of ...int64) ([]order, error) {
	const insert = `
		WITH numbered AS (
			UPDATE customers SET orders = orders + 1 WHERE id = ANY($1) RETURNING id, orders
		)
		INSERT INTO orders (customer, number) SELECT id, orders FROM numbered RETURNING id, customer, number`
	rows, err := tx.Query(ctx, insert, of)
	if err != nil {
		return nil, fmt.Errorf("insert orders: %w", err)
	}
	orders, err := pgx.CollectRows(rows, pgx.RowToStructByPos[order])
	if err != nil {
		return nil, fmt.Errorf("insert orders: %w", err)
	}
	for _, topic := range topics {
		messages := make([]*message.Message, len(orders))
		for i, o := range orders {
			messages[i] = o.message(ctx, topic)
		}
		if err := s.pub.WithTx(tx).Publish(topic, messages...); err != nil {
			return nil, err
		}
	}
	return orders, nil
}

// order places orders in a transaction of their own.
func (s *shop) order(ctx context.Context, of ...int64) error {
	var placed []order
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		placed, err = s.place(ctx, tx, of...)
		return err
	})
	if err == nil {
		s.meter.commit(time.Now(), placed)
	}
	return err
}

// committed is the truth: the orders that are in the database.
func (s *shop) committed(ctx context.Context) ([]order, error) {
	rows, err := s.pool.Query(ctx, "SELECT id, customer, number FROM orders")
	if err != nil {
		return nil, fmt.Errorf("read orders: %w", err)
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[order])
}
