package pgoutbox

import (
	"context"
	"fmt"
	"slices"
	"strconv"
)

// epoch is the time that an outbox spent on one server. After a restore, a logical copy or an upgrade another server hands
// out transaction ids from the start, so a row's xid says something only together with the epoch of the row, and that is
// told by its id: row ids go on.
type epoch struct {
	number int32
	server string // its system identifier; "": it would not tell
	first  int64  // rows below it were committed on the servers before, or here before the epoch began
}

func (g *leadership) epoch() epoch { return g.epochs[len(g.epochs)-1] }

// checkServer compares the server with the one that the newest transaction ids in the table belong to, and begins a new epoch
// where it is another one. A Leader reads no rows, so any server is right.
func (g *leadership) checkServer(ctx context.Context, s *session) error {
	if g.lockOnly {
		return nil
	}
	if err := g.readEpochs(ctx, s); err != nil {
		return err
	}
	here, err := s.ask(ctx, g.queries.identity)
	if hasCode(err, codeInsufficientPrivilege) || (err == nil && g.epoch().server == "") {
		g.reportOnce("the server's identity is unknown, so a restore into another server would not be noticed", map[string]any{
			"grant": "EXECUTE ON FUNCTION pg_control_system()",
		})
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the server's identity: %w", err)
	}
	from := g.epoch().server
	if from == here[0] {
		return nil
	}
	if err := g.rebase(ctx, s, here[0]); err != nil {
		return fmt.Errorf("the outbox comes from another server (system identifier %s, this one is %s); to go on here: %w", from, here[0], err)
	}
	return nil
}

func (g *leadership) readEpochs(ctx context.Context, s *session) error {
	results, err := s.roundTrip(ctx, request{sql: g.queries.epochs})
	if err == nil {
		err = results[0].Err
	}
	if err != nil {
		return fmt.Errorf("read the epochs: %w", err)
	}
	var epochs []epoch
	for _, row := range results[0].Rows {
		number, err := strconv.ParseInt(string(row[0]), 10, 32)
		if err != nil {
			return fmt.Errorf("read the epochs: number: %w", err)
		}
		first, err := strconv.ParseInt(string(row[2]), 10, 64)
		if err != nil {
			return fmt.Errorf("read the epochs: first id: %w", err)
		}
		epochs = append(epochs, epoch{number: int32(number), server: string(row[1]), first: first})
	}
	if len(epochs) == 0 {
		return permanent(fmt.Errorf("%s is empty: copy it from where the outbox came from, or run Migrate", g.names.quoted("_epochs")))
	}
	g.epochs = epochs
	return nil
}

// rebase begins the epoch of this server, unless another process was first. No row is rewritten: the table's lock shows that
// whatever has an id below the epoch's first has ended, so such a row's transaction id need not be looked at again. An
// error leaves the transaction to the session, which ends with it.
func (g *leadership) rebase(ctx context.Context, s *session, here string) error {
	if _, err := s.ask(ctx, "BEGIN"); err != nil {
		return err
	}
	if _, err := s.ask(ctx, g.queries.rebaseLock); hasCode(err, codeInsufficientPrivilege) {
		return permanent(fmt.Errorf("GRANT UPDATE ON %s to the role of the lock session, which is needed this once: %w", g.names.quoted(""), err))
	} else if err != nil {
		return fmt.Errorf("wait for the transactions that write: %w", err)
	}
	if err := g.readEpochs(ctx, s); err != nil {
		return err
	}
	if g.epoch().server == here {
		_, err := s.ask(ctx, "ROLLBACK")
		return err
	}
	first, err := g.firstID(ctx, s)
	if err != nil {
		return err
	}
	next := epoch{number: g.epoch().number + 1, server: here, first: first}
	results, err := s.roundTrip(ctx, request{sql: g.queries.rebase, args: []any{int64(next.number), here, first}, durable: true})
	if err == nil {
		err = results[0].Err
	}
	if hasCode(err, codeInsufficientPrivilege) {
		return permanent(fmt.Errorf("GRANT INSERT ON %s to the role of the lock session, which is needed this once: %w",
			g.names.quoted("_epochs"), err))
	}
	if err != nil {
		return err
	}
	if _, err := s.ask(ctx, "COMMIT"); err != nil {
		return err
	}
	g.epochs = append(g.epochs, next)
	g.report.info("the outbox came from another server and goes on here", map[string]any{"epoch": next.number, "first_id": first})
	return nil
}

// firstID is the first id that the sequence will hand out. It must be above all that went before, or new rows would look as if
// they had been delivered.
func (g *leadership) firstID(ctx context.Context, s *session) (int64, error) {
	results, err := s.roundTrip(ctx, request{sql: g.queries.mark}, request{sql: g.queries.probe}, request{sql: g.queries.rebaseMarks})
	if err != nil {
		return 0, fmt.Errorf("read the marks: %w", err)
	}
	var marks [3]int64
	var row []string
	for i, result := range results {
		if row, err = firstRow(result); err == nil {
			marks[i], err = strconv.ParseInt(row[0], 10, 64)
		}
		if err != nil {
			return 0, fmt.Errorf("read the marks: %w", err)
		}
	}
	if subscription := row[1]; subscription != "" {
		return 0, permanent(fmt.Errorf("the subscription %q may still copy rows into %s: let it catch up, then ALTER SUBSCRIPTION %s DISABLE",
			subscription, g.names.quoted(""), quoteIdentifier(subscription)))
	}
	last, reached := marks[0], max(marks[1], marks[2])
	if last < reached {
		return 0, permanent(g.behind(last, reached))
	}
	return last + 1, nil
}

// behind names the repair of a sequence that did not come along.
func (g *leadership) behind(last, reached int64) error {
	table, sequence := g.names.quoted(""), quoteLiteral(g.names.quoted("_id_seq"))
	return fmt.Errorf("the sequence stands at %d, rows and positions at %d, so new rows would fail or be taken for delivered: in one "+
		"transaction LOCK TABLE %s; SELECT setval(%s, %d); and for the rows that were inserted here meanwhile UPDATE %s SET id = DEFAULT "+
		"WHERE id <= %d AND xid::xid = xmin", last, reached, table, sequence, reached, table, reached)
}

// date tells a stored position when its epochs began. A position that this server has yet to reach would wait for it in
// silence, and then take old transactions for new ones.
func (g *leadership) date(at position, xmax uint64) error {
	for _, s := range []*snapshot{&at.batch.after, &at.batch.upto} {
		if at.atEnd() && s == &at.batch.after {
			continue // between batches there is one snapshot
		}
		i := slices.IndexFunc(g.epochs, func(e epoch) bool { return e.number == s.epoch })
		if i < 0 {
			return fmt.Errorf("its position is of epoch %d, which %s does not know: copy that table from where the position came from",
				s.epoch, g.names.quoted("_epochs"))
		}
		s.first = g.epochs[i].first
		if s.epoch == g.epoch().number && s.xmax > xmax {
			return fmt.Errorf("its position is in this server's future (transaction %d, the server is at %d): it came from another server. "+
				"To go on from it: UPDATE %s SET system_identifier = 0 WHERE epoch = %d", s.xmax, xmax, g.names.quoted("_epochs"), s.epoch)
		}
	}
	return nil
}
