package torture

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Naive reads "id > cursor", as most home-made outboxes do. It must lose: ids are drawn at INSERT and become visible at
// COMMIT, so a cursor that has passed 7 never sees a 6 that commits later.
type Naive struct{}

// Run delivers in id order. Its cursor is in memory: it is not to be killed.
func (Naive) Run(ctx context.Context, dsn string, deliver Deliver) error {
	var cursor int64
	return poll(ctx, dsn, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
			SELECT id, topic, coalesce(key, ''), payload FROM outbox WHERE id > $1 ORDER BY id LIMIT 1000`, cursor)
		if err != nil {
			return err
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery])
		if err != nil {
			return err
		}
		for _, d := range found {
			if err := deliver(d)(ctx); err != nil {
				return err
			}
			cursor = d.Row
		}
		return nil
	})
}

// poll runs do every 10 ms on one connection until ctx ends.
func poll(ctx context.Context, dsn string, do func(context.Context, *pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return ignoreEnd(ctx, err)
	}
	// The farewell must be said although ctx has ended.
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(ctx) // nothing depends on it
	}()
	for ctx.Err() == nil {
		if err := do(ctx, conn); err != nil {
			return ignoreEnd(ctx, fmt.Errorf("poll: %w", err))
		}
		_ = pause(ctx, 10*time.Millisecond) // the loop looks at ctx
	}
	return nil
}

// ignoreEnd forgets an error that came after ctx's end: it was asked for.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		err = nil
	}
	return err
}
