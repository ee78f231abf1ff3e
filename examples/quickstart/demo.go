package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"golang.org/x/sync/errgroup"
)

// demo is one run, from the servers to the verdict.
type demo struct {
	rows     int // messages to commit, about
	writers  int
	rate     int // messages per second
	duration time.Duration
	backlog  int // messages that are there before forwarding begins
	bridge   bool
	hold     time.Duration // how long one transaction stays open
	patience time.Duration // how long to wait for messages that do not come
	logger   watermill.LoggerAdapter
	screen   *screen
	tamper   func(message.Publisher) message.Publisher // nil, but for tests that break the relay
}

// run returns an error when the demo could not be carried out, its context's end included. Everything it started has ended
// when it returns.
func (d *demo) run(ctx context.Context) (v verdict, err error) {
	s, err := startServers(ctx, d.screen)
	if err != nil {
		return verdict{}, err
	}
	defer func() { err = errors.Join(err, s.close(ctx)) }()
	pool, err := s.database(ctx, d.writers+8) // beside the writers: the reader, the transactions of trouble.go, ourselves
	if err != nil {
		return verdict{}, err
	}
	shop, err := openShop(ctx, pool)
	if err != nil {
		return verdict{}, err
	}
	streams, err := openStreams(ctx, s.redis.URL())
	if err != nil {
		return verdict{}, err
	}
	defer func() { err = errors.Join(err, streams.close(ctx)) }()
	forward, err := d.forwarder(s, streams, shop.meter)
	if err != nil {
		return verdict{}, err
	}
	if err := d.work(ctx, shop, forward); err != nil {
		return verdict{}, err
	}
	orders, err := shop.committed(ctx)
	if err != nil {
		return verdict{}, err
	}
	deliveries, err := streams.read(ctx)
	if err != nil {
		return verdict{}, err
	}
	v = judge(orders, deliveries)
	d.screen.table(v, shop.meter, d.hold)
	return v, nil
}

// forwarder returns the relay under test, as a function that forwards until its context ends.
func (d *demo) forwarder(s *servers, to *streams, m *meter) (func(context.Context) error, error) {
	redis, err := to.publisher(d.logger)
	if err != nil {
		return nil, err
	}
	var pub message.Publisher = &metered{Publisher: redis, prefix: to.prefix, meter: m}
	if d.tamper != nil {
		pub = d.tamper(pub)
	}
	forward := forwardByRouter
	if d.bridge {
		forward = forwardByBridge
	}
	return func(ctx context.Context) (err error) {
		defer func() { err = errors.Join(err, redis.Close()) }()
		err = forward(ctx, s.pool, pub, d.logger)
		if err == nil && ctx.Err() == nil {
			err = errors.New("the relay ended by itself")
		}
		return err
	}, nil
}

// work writes and forwards until everything that committed has arrived, or nothing more comes.
func (d *demo) work(ctx context.Context, shop *shop, forward func(context.Context) error) error {
	if d.backlog > 0 {
		if err := d.pile(ctx, shop); err != nil {
			return fmt.Errorf("write a backlog: %w", err)
		}
	}
	all, ctx := errgroup.WithContext(ctx)
	relaying, endRelay := context.WithCancel(ctx)
	defer endRelay()
	began := time.Now()
	all.Go(func() error { return forward(relaying) })
	all.Go(func() error { d.screen.watch(relaying, shop.meter); return nil })
	all.Go(func() error {
		defer endRelay()
		if d.backlog > 0 {
			if !shop.meter.drained(ctx, d.patience) {
				return errors.New("the backlog was not forwarded")
			}
			d.screen.rate(shop.meter.lastForwarded().Sub(began), shop.meter)
		}
		if err := d.write(ctx, shop); err != nil {
			return err
		}
		shop.meter.drained(ctx, d.patience)
		return ctx.Err()
	})
	return all.Wait()
}
