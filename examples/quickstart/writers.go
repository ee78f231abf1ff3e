package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// progress is how far writing has come, 1 at its end: the rows are written or the time is over.
type progress struct {
	demo  *demo
	shop  *shop
	began time.Time
}

func (p *progress) share() float64 {
	written := p.shop.meter.totals().committed - p.demo.backlog
	return max(float64(written)/float64(p.demo.rows), float64(time.Since(p.began))/float64(p.demo.duration))
}

// await waits until writing has come so far.
func (p *progress) await(ctx context.Context, share float64) error {
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for p.share() < share {
		select {
		case <-look.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// write has the writers place orders and the troublemakers make trouble, until all of them are done.
func (d *demo) write(ctx context.Context, shop *shop) error {
	all, ctx := errgroup.WithContext(ctx)
	p := &progress{demo: d, shop: shop, began: time.Now()}
	shop.meter.begin(p.began)
	for range d.writers {
		all.Go(func() error { return d.writer(ctx, shop, p) })
	}
	all.Go(func() error { return d.stayOpen(ctx, shop, p) })
	all.Go(func() error { return d.startEarly(ctx, shop, p) })
	all.Go(func() error { return d.terminate(ctx, shop, p) })
	return all.Wait()
}

var errChangedMind = errors.New("the customer changed their mind")

// writer places one order in each transaction. One transaction in ten rolls back when its messages are written already.
func (d *demo) writer(ctx context.Context, shop *shop, p *progress) error {
	pace := time.NewTicker(time.Second * time.Duration(d.writers*len(topics)) / time.Duration(d.rate))
	defer pace.Stop()
	for p.share() < 1 {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		if rand.N(10) > 0 {
			if err := shop.order(ctx, somebody()); err != nil {
				return err
			}
			continue
		}
		err := pgx.BeginFunc(ctx, shop.pool, func(tx pgx.Tx) error {
			if _, err := shop.place(ctx, tx, somebody()); err != nil {
				return err
			}
			return errChangedMind
		})
		if !errors.Is(err, errChangedMind) {
			return err
		}
		shop.meter.rollBack(len(topics))
	}
	return nil
}

func somebody() int64 { return 1 + rand.N(int64(customers-1)) }

// pile writes the backlog, many orders a transaction. Every goroutine has customers of its own, else two transactions could
// wait for each other's locks.
func (d *demo) pile(ctx context.Context, shop *shop) error {
	all, ctx := errgroup.WithContext(ctx)
	each := (customers - 1) / d.pilers()
	for n := range d.pilers() {
		mine := make([]int64, each)
		for i := range mine {
			mine[i] = int64(1 + n*each + i)
		}
		all.Go(func() error {
			share := d.backlog / len(topics) / d.pilers() // orders
			for share > 0 {
				now := mine[:min(share, len(mine))]
				if err := shop.order(ctx, now...); err != nil {
					return err
				}
				share -= len(now)
			}
			return nil
		})
	}
	return all.Wait()
}

func (d *demo) pilers() int { return min(d.writers, 4) }
