//go:build unix

package faults

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// Child is the other end of a Process: TestMain calls it first. In a child it plays the role that the parent asked for, and
// returns the exit code and true; anywhere else it returns false at once.
func Child() (code int, isChild bool) {
	text, isChild := os.LookupEnv(roleVariable)
	if !isChild {
		return 0, false
	}
	c := &child{out: json.NewEncoder(os.Stdout), ack: make(chan struct{})}
	if err := json.Unmarshal([]byte(text), &c.Role); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2, true
	}
	ctx, orphaned := context.WithCancel(context.Background())
	defer orphaned()
	go func() { // ends with the process: a read from standard input cannot be called off
		var acked sync.Once
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			acked.Do(func() { close(c.ack) })
		}
		orphaned() // the parent is gone
	}()
	if err := c.run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

type child struct {
	Role

	ack chan struct{} // closed: held rows may be acked

	mu  sync.Mutex
	out *json.Encoder
}

func (c *child) run(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, c.DSN)
	if err != nil {
		return err
	}
	defer pool.Close()
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, nil)))
	if c.Bridge {
		bridge, err := pgoutbox.NewPublisherBridge(pool, c, pgoutbox.BridgeConfig{
			ConsumerGroup: group, Shards: c.Shards, Lanes: c.Lanes, BatchSize: 1, MaxAttempts: c.MaxAttempts,
			Lease: c.Lease, RetryInterval: c.Retry, SaveInterval: c.Save,
		}, logger)
		if err != nil {
			return err
		}
		return bridge.Run(ctx)
	}
	sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{
		ConsumerGroup: group, Shards: c.Shards, MaxInFlight: c.Lanes, MaxAttempts: c.MaxAttempts,
		Lease: c.Lease, RetryInterval: c.Retry, SaveInterval: c.Save,
	}, logger)
	if err != nil {
		return err
	}
	messages, err := sub.Subscribe(ctx, pgoutbox.AllTopics)
	if err != nil {
		return err
	}
	var handlers sync.WaitGroup
	for msg := range messages {
		if c.Serial {
			c.handle(msg)
			msg.Ack()
			continue
		}
		handlers.Go(func() {
			c.handle(msg)
			msg.Ack()
		})
	}
	handlers.Wait()
	return sub.Close()
}

const group = "faults"

// handle tells the parent of a row, before anything else, and works on it.
func (c *child) handle(msg *message.Message) {
	now := time.Now()
	row, _ := pgoutbox.RowFromContext(msg.Context())
	c.mu.Lock()
	_ = c.out.Encode(Delivery{At: now, PID: os.Getpid(), Shard: row.Shard, Term: row.Term, ID: row.ID, Key: row.Key})
	c.mu.Unlock()
	if c.Poison != "" && row.Key == c.Poison {
		os.Exit(3)
	}
	if c.Hold != "" && row.Key == c.Hold {
		<-c.ack
		return
	}
	timer := time.NewTimer(c.Work)
	defer timer.Stop()
	<-timer.C
}

// Publish makes the child the destination of its bridge.
func (c *child) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		c.handle(msg)
	}
	return nil
}

// Close is not called: a bridge does not close what it did not open.
func (*child) Close() error { return nil }
