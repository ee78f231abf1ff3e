package main

import (
	"cmp"
	"context"
	"errors"
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

// terminate ends the relay's lock session from outside, half-way, and places one more order, so that there is something to
// forward for whoever takes over.
func (d *demo) terminate(ctx context.Context, shop *shop, p *progress) error {
	if err := p.await(ctx, 0.5); err != nil {
		return err
	}
	// Not a condition: PostgreSQL would be free to ask it first, of every session of the server.
	const sql = `
		SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND application_name = 'pgoutbox ' || $1`
	began := time.Now()
	for {
		var pid int
		var done bool
		shop.meter.terminate(time.Now())
		err := shop.pool.QueryRow(ctx, sql, group).Scan(&pid, &done)
		if err == nil && done {
			d.screen.eventf("pg_terminate_backend(%d): the relay has lost its lock session", pid)
			return shop.order(ctx, somebody())
		}
		// A relay that is just opening a session, on a machine with much else to do, gets some time.
		if (err != nil && !errors.Is(err, pgx.ErrNoRows)) || time.Since(began) > d.patience {
			return fmt.Errorf("terminate the relay's lock session: %w", cmp.Or(err, errGone))
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}

var errGone = errors.New("it is gone already")

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
