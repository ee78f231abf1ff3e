package torture

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// Entry is one message that committed, from the ledger.
type Entry struct {
	Message
	Long bool // written by a transaction that stayed open for seconds
}

// readOracle reads from the database what committed, and checks that it can be trusted: the versions of a key have no
// gap. (That they do not repeat is the ledger's unique index.)
func readOracle(ctx context.Context, conn *pgx.Conn) ([]Entry, error) {
	rows, err := conn.Query(ctx, `SELECT message, key, version, long FROM torture_ledger ORDER BY key, version`)
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	keys := make(map[string]string) // one string a key, not one a row
	oracle, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Entry, error) {
		var e Entry
		if err := row.Scan(&e.ID, &e.Key, &e.Version, &e.Long); err != nil {
			return e, err
		}
		if _, ok := keys[e.Key]; !ok {
			keys[e.Key] = e.Key
		}
		e.Key = keys[e.Key]
		return e, nil
	})
	if err != nil {
		return nil, fmt.Errorf("read the ledger: %w", err)
	}
	for i, e := range oracle {
		first := i == 0 || oracle[i-1].Key != e.Key
		if e.Key != "" && (first && e.Version != 1 || !first && e.Version != oracle[i-1].Version+1) {
			return nil, fmt.Errorf("the ledger of key %s has a gap before version %d", e.Key, e.Version)
		}
	}
	return oracle, nil
}
