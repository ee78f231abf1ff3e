package main

import (
	"context"
	"errors"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

const group = "relay"

// forwardByRouter forwards every topic through a Watermill Router until ctx ends.
func forwardByRouter(ctx context.Context, pool *pgxpool.Pool, pub message.Publisher, logger watermill.LoggerAdapter) (err error) {
	sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: group}, logger)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sub.Close()) }()
	router, err := message.NewRouter(message.RouterConfig{}, logger)
	if err != nil {
		return err
	}
	router.AddHandler("relay", pgoutbox.AllTopics, sub, "", pgoutbox.RouteByTopic(pub), message.PassthroughHandler)
	return router.Run(ctx)
}

// forwardByBridge forwards every topic without a Router until ctx ends.
func forwardByBridge(ctx context.Context, pool *pgxpool.Pool, pub message.Publisher, logger watermill.LoggerAdapter) error {
	bridge, err := pgoutbox.NewPublisherBridge(pool, pub, pgoutbox.BridgeConfig{ConsumerGroup: group}, logger)
	if err != nil {
		return err
	}
	return bridge.Run(ctx)
}
