package main

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// stayOpen writes an order and its messages, and commits seconds later. Their row ids are long passed by then, so a reader
// that remembers only the last id loses them; one that waits for open transactions stalls.
func (d *demo) stayOpen(ctx context.Context, shop *shop, p *progress) error {
	if err := p.await(ctx, 0.05); err != nil {
		return err
	}
	var placed []order
	err := pgx.BeginFunc(ctx, shop.pool, func(tx pgx.Tx) (err error) {
		if placed, err = shop.place(ctx, tx, patientCustomer); err != nil {
			return err
		}
		shop.meter.open(time.Now())
		d.screen.eventf("a transaction has written its messages and stays open for %s", d.hold)
		return pause(ctx, d.hold)
	})
	if err != nil {
		return err
	}
	shop.meter.commit(time.Now(), placed)
	shop.meter.closed(time.Now())
	d.screen.eventf("the open transaction has committed")
	return nil
}

// startEarly has transactions that draw their transaction id by an earlier write and lock the customer only after another
// transaction, with a later id, has ordered for them and committed. A reader that sorts by transaction id turns the two
// around.
func (d *demo) startEarly(ctx context.Context, shop *shop, p *progress) error {
	every := time.NewTicker(100 * time.Millisecond)
	defer every.Stop()
	for p.share() < 1 {
		select {
		case <-every.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		var placed []order
		err := pgx.BeginFunc(ctx, shop.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "INSERT INTO visits DEFAULT VALUES"); err != nil {
				return err
			}
			customer := somebody()
			if err := shop.order(ctx, customer); err != nil {
				return err
			}
			var err error
			placed, err = shop.place(ctx, tx, customer)
			return err
		})
		if err != nil {
			return err
		}
		shop.meter.commit(time.Now(), placed)
	}
	return nil
}

// terminate ends the relay's lock session from outside, half-way.
func (d *demo) terminate(ctx context.Context, shop *shop, p *progress) error {
	if err := p.await(ctx, 0.5); err != nil {
		return err
	}
	const sql = `
		SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'pgoutbox ' || $1`
	var pid int
	var done bool
	shop.meter.terminate(time.Now())
	if err := shop.pool.QueryRow(ctx, sql, group).Scan(&pid, &done); err != nil {
		return fmt.Errorf("terminate the lock session: %w", err)
	}
	if !done {
		return fmt.Errorf("terminate the lock session: process %d is gone already", pid)
	}
	d.screen.eventf("pg_terminate_backend(%d): the relay has lost its lock session", pid)
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
