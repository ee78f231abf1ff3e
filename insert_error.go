package pgoutbox

import (
	"errors"
	"fmt"

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
	case codeUndefinedTable, codeUndefinedSchema:
		return "the outbox is not there: run Migrate, or what SchemaSQL returns, in this database"
	case codeUndefinedColumn:
		return "the table is not an outbox of this version: run Migrate, or choose another name"
	case codeInsufficientPrivilege:
		return fmt.Sprintf("the role needs GRANT USAGE ON SCHEMA %s and GRANT INSERT (topic, key, uuid, metadata, payload) ON %s, and "+
			"a policy that lets the rows in where row-level security is on", quoteIdentifier(n.schema), n.quoted(""))
	case codeFailedTransaction:
		return "an earlier statement of this transaction failed: roll back, its error says why"
	case codeUniqueViolation:
		var server *pgconn.PgError // lib/pq's does not tell the constraint; the table has no other of ours
		if !errors.As(err, &server) || server.ConstraintName == n.table+"_pkey" {
			return fmt.Sprintf("the sequence stands below the table's rows, as after a copy that left it behind: SELECT setval(%s, "+
				"(SELECT max(id) FROM %s))", quoteLiteral(n.quoted("_id_seq")), n.quoted(""))
		}
	case codeReadOnly:
		return "the transaction is read-only, or the server is a standby"
	}
	return ""
}
