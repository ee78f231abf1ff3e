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

// SQLSTATEs that are acted on (appendix A of the PostgreSQL manual).
const (
	codeInsufficientPrivilege = "42501"
	codeReadOnly              = "25006"
	codeProgramLimit          = "54000"
)

func hasCode(err error, code string) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == code
}
