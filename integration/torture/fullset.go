package torture

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// FullSet is a reader that is right by construction and far too dear: it writes down the id of every row that was
// acknowledged, and each poll delivers, in id order, what one snapshot sees of all others. Ids grow in causal order and a
// snapshot that sees a row sees everything it can depend on, so it must pass. When it does not, the harness is wrong.
type FullSet struct{}

// Run delivers until ctx ends, and starts over after any database error. It may be killed at any point.
func (f FullSet) Run(ctx context.Context, dsn string, deliver Deliver) error {
	for ctx.Err() == nil {
		if err := f.read(ctx, dsn, deliver); err != nil && ctx.Err() == nil {
			_ = pause(ctx, 100*time.Millisecond) // the loop looks at ctx
		}
	}
	return nil
}

func (f FullSet) read(ctx context.Context, dsn string, deliver Deliver) error {
	locked := false
	return poll(ctx, dsn, func(ctx context.Context, conn *pgx.Conn) error {
		if !locked {
			for _, statement := range []string{
				`SET application_name = 'fullset'`,
				`SELECT pg_advisory_lock(7014)`,
				`CREATE TABLE IF NOT EXISTS torture_seen (id bigint PRIMARY KEY)`,
			} {
				if _, err := conn.Exec(ctx, statement); err != nil {
					return err
				}
			}
			locked = true
		}
		rows, err := conn.Query(ctx, `
			SELECT id, topic, coalesce(key, ''), payload FROM outbox o
			WHERE NOT EXISTS (SELECT FROM torture_seen s WHERE s.id = o.id)
			ORDER BY id`)
		if err != nil {
			return err
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Delivery])
		if err != nil {
			return err
		}
		for part := range slices.Chunk(found, 200) {
			acked := f.deliver(ctx, part, deliver)
			if err := f.save(ctx, conn, acked); err != nil {
				return err
			}
			if len(acked) < len(part) {
				return errors.Join(ErrRefused, ctx.Err())
			}
		}
		return nil
	})
}

// save must happen after an orderly stop too, or acknowledged rows would come again.
func (FullSet) save(ctx context.Context, conn *pgx.Conn, acked []int64) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	_, err := conn.Exec(ctx, `INSERT INTO torture_seen SELECT unnest($1::bigint[])`, acked)
	return err
}

// deliver delivers rows: of one key one after the other, of different keys at the same time. It returns the ids that were
// acknowledged; after a refusal the rest of the key is left out. Handlers may finish after ctx has ended, but not begin.
func (FullSet) deliver(ctx context.Context, rows []Delivery, deliver Deliver) (acked []int64) {
	handling, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	lanes := make(map[string][]Delivery)
	for _, d := range rows {
		lanes[d.Key] = append(lanes[d.Key], d)
	}
	var (
		mu      sync.Mutex
		running sync.WaitGroup
	)
	for _, lane := range lanes {
		running.Go(func() {
			for _, d := range lane {
				if ctx.Err() != nil || deliver(d)(handling) != nil {
					return
				}
				mu.Lock()
				acked = append(acked, d.Row)
				mu.Unlock()
			}
		})
	}
	running.Wait()
	return acked
}
