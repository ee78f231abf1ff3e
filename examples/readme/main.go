// Command readme writes an order and its message in one transaction, and forwards every message to Redis until Ctrl-C.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/redis/go-redis/v9"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	logger := watermill.NewStdLogger(false, false)
	pool := must(pgxpool.New(ctx, os.Getenv("DATABASE_URL")))
	defer pool.Close()
	must(pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS orders (id text PRIMARY KEY)"))
	check(pgoutbox.Migrate(ctx, pool, pgoutbox.SchemaConfig{})) // creates the table outbox

	// Write: the order and its message, both or neither.
	outbox := must(pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{}, logger))
	check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		id := watermill.NewUUID()
		if _, err := tx.Exec(ctx, "INSERT INTO orders (id) VALUES ($1)", id); err != nil {
			return err
		}
		msg := message.NewMessage(watermill.NewUUID(), []byte(`{"order": "`+id+`"}`))
		msg.Metadata.Set(pgoutbox.OrderingKey, id) // messages of one order stay in order
		return outbox.WithTx(tx).Publish("orders", msg)
	}))

	// Forward: every message that committed, to the Redis stream of its topic.
	client := redis.NewClient(must(redis.ParseURL(os.Getenv("REDIS_URL"))))
	pub := must(redisstream.NewPublisher(redisstream.PublisherConfig{Client: client}, logger))
	sub := must(pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: "relay"}, logger))
	router := must(message.NewRouter(message.RouterConfig{}, logger))
	router.AddHandler("relay", pgoutbox.AllTopics, sub, "", pgoutbox.RouteByTopic(pub), message.PassthroughHandler)
	check(router.Run(ctx))
	check(sub.Close())
	check(pub.Close())
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func must[T any](value T, err error) T { check(err); return value }
