package torture

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Xmin reads what is older than every open transaction, in the order of (xid, id), as watermill-sql does. It loses
// nothing, but it must stall behind any open write transaction, and invert a key whose second transaction drew its xid
// before it waited for the first one's lock.
type Xmin struct{}

// Run delivers in (xid, id) order. Its cursor is in memory: it is not to be killed.
func (Xmin) Run(ctx context.Context, dsn string, deliver Deliver) error {
	type row struct {
		Delivery
		WrittenBy string
	}
	cursor := row{WrittenBy: "0"}
	return poll(ctx, dsn, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := conn.Query(ctx, `
			SELECT id, topic, coalesce(key, ''), payload, xid::text AS written_by
			FROM outbox
			WHERE (xid, id) > ($1::text::xid8, $2) AND xid < pg_snapshot_xmin(pg_current_snapshot())
			ORDER BY xid, id
			LIMIT 1000`, cursor.WrittenBy, cursor.Row)
		if err != nil {
			return err
		}
		found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			return err
		}
		for _, r := range found {
			if err := deliver(r.Delivery)(ctx); err != nil {
				return err
			}
			cursor = r
		}
		return nil
	})
}
