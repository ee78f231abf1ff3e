package pgoutbox

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// mayBeStored tells, for a statement outside a transaction, whether it may have been stored although it returned err. Only an
// ERROR of the server says no: a FATAL one can come after the commit, when the session is terminated.
func mayBeStored(err error) bool {
	if pgconn.SafeToRetry(err) {
		return false
	}
	var server *pgconn.PgError
	return !errors.As(err, &server) || server.SeverityUnlocalized != "ERROR"
}

// explain adds what was attempted, and what to do about the errors that users meet first.
func (n names) explain(err error, messages int) error {
	attempt := fmt.Sprintf("insert %d messages into %s", messages, n.quoted(""))
	if hint := n.hint(err); hint != "" {
		return fmt.Errorf("%s: %w (%s)", attempt, err, hint)
	}
	return fmt.Errorf("%s: %w", attempt, err)
}

func (n names) hint(err error) string {
	switch sqlState(err) {
	case "42P01", "3F000": // undefined_table, invalid_schema_name
		return "the outbox is not there: run Migrate, or what SchemaSQL returns, in this database"
	case "42703": // undefined_column
		return "the table is not an outbox of this version: run Migrate, or choose another name"
	case "42501": // insufficient_privilege
		return fmt.Sprintf("the role needs GRANT USAGE ON SCHEMA %s and GRANT INSERT (topic, key, uuid, metadata, payload) ON %s, and "+
			"a policy that lets the rows in where row-level security is on", quoteIdentifier(n.schema), n.quoted(""))
	case "25P02": // in_failed_sql_transaction
		return "an earlier statement of this transaction failed: roll back, its error says why"
	case "23505": // unique_violation
		if strings.Contains(err.Error(), n.table+"_pkey") {
			return fmt.Sprintf("the sequence stands below the table's rows, as after a copy that left it behind: SELECT setval(%s, "+
				"(SELECT max(id) FROM %s))", quoteLiteral(n.quoted("_id_seq")), n.quoted(""))
		}
	case "25006": // read_only_sql_transaction
		return "the transaction is read-only, or the server is a standby"
	}
	return ""
}

// sqlState works for pgx and lib/pq; "" when err is not the server's.
func sqlState(err error) string {
	var server interface{ SQLState() string }
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}
