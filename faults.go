package pgoutbox

import (
	"errors"

	"github.com/jackc/pgx/v5/pgconn"
)

// permanentError is one that waiting does not mend: somebody must change the configuration, the schema or a grant.
type permanentError struct{ error }

func (e permanentError) Unwrap() error { return e.error }

func permanent(err error) error { return permanentError{err} }

// isPermanent reports whether the caller should be told instead of a background loop.
func isPermanent(err error) bool {
	var p permanentError
	return errors.As(err, &p) || errors.Is(err, ErrPooledConnection)
}

// fatal reports whether an error leaves the connection unusable or its state unknown.
func fatal(err error) bool {
	if err == nil {
		return false
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return true
	}
	return pg.SeverityUnlocalized == "FATAL" || pg.SeverityUnlocalized == "PANIC"
}

// SQLSTATEs that are acted on (appendix A of the PostgreSQL manual). Every other one is survived: a connection that is unusable is
// thrown away, and what failed is tried again.
const (
	codeInsufficientPrivilege = "42501"
	codeReadOnly              = "25006"
	codeProgramLimit          = "54000"
	codeUniqueViolation       = "23505"
	codeFailedTransaction     = "25P02"
	codeUndefinedTable        = "42P01"
	codeUndefinedSchema       = "3F000"
	codeUndefinedColumn       = "42703"
)

// sqlState works for pgx and lib/pq; "" when err is not the server's.
func sqlState(err error) string {
	var server interface{ SQLState() string }
	if errors.As(err, &server) {
		return server.SQLState()
	}
	return ""
}

func hasCode(err error, code string) bool { return sqlState(err) == code }
