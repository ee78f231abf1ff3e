package pgoutbox

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// schemaVersion goes up whenever schema.sql changes what exists.
const schemaVersion = 2

const oldestServer = 140000 // server_version_num: idle_session_timeout, which the lease rests on

// outboxColumns tells an outbox from somebody's own table of the same name.
var outboxColumns = []string{"created_at", "slot", "topic", "key", "uuid", "metadata", "payload", "xid", "id"}

// schemaState is what the catalogs say, see schema_state.sql.
type schemaState struct {
	ServerVersion   int
	Role            string
	Database        string
	MayCreateSchema bool
	SchemaExists    bool
	MayCreate       bool
	TableExists     bool
	Owner           string
	MayAlter        bool
	Comment         string
	Columns         []string
	Missing         []string
}

func readSchemaState(ctx context.Context, tx pgx.Tx, n names) (schemaState, error) {
	// Somebody's own pg_class, in a schema that the role's search_path puts first, must not answer.
	if _, err := tx.Exec(ctx, "SET LOCAL search_path = pg_catalog", pgx.QueryExecModeSimpleProtocol); err != nil {
		return schemaState{}, fmt.Errorf("set the search_path: %w", err)
	}
	rows, err := tx.Query(ctx, n.query("schema_state"), pgx.QueryExecModeExec, n.schema, n.table, n.derivedNames())
	if err != nil {
		return schemaState{}, fmt.Errorf("read the catalogs: %w", err)
	}
	state, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[schemaState])
	if err != nil {
		return schemaState{}, fmt.Errorf("read the catalogs: %w", err)
	}
	return state, nil
}

// current tells whether everything is there. False without an error means: it is not, and this role can change that.
func (s schemaState) current(n names) (bool, error) {
	if s.ServerVersion < oldestServer {
		return false, fmt.Errorf("the server is PostgreSQL %d; 14 or later is needed", s.ServerVersion/10000)
	}
	version, recorded := schemaVersionIn(s.Comment)
	switch {
	case version > schemaVersion:
		return false, fmt.Errorf("the schema has version %d, this library knows %d: update the library", version, schemaVersion)
	case version == schemaVersion && len(s.Missing) == 0:
		return true, nil
	case s.TableExists && !recorded && len(s.missingColumns()) > 0:
		return false, fmt.Errorf("the table exists and is not an outbox, it has no column %s: choose another name",
			strings.Join(s.missingColumns(), ", "))
	}
	return false, s.mayChange(n)
}

func (s schemaState) missingColumns() []string {
	return slices.DeleteFunc(slices.Clone(outboxColumns), func(c string) bool { return slices.Contains(s.Columns, c) })
}

func (s schemaState) mayChange(n names) error {
	schema, role := quoteIdentifier(n.schema), quoteIdentifier(s.Role)
	switch {
	case !s.SchemaExists && !s.MayCreateSchema:
		return fmt.Errorf("%s; the schema does not exist and the role may not create it: create it, or GRANT CREATE ON DATABASE %s TO %s",
			s.lack(), quoteIdentifier(s.Database), role)
	case s.SchemaExists && !s.MayCreate:
		return fmt.Errorf("%s, and the role may not create it: GRANT CREATE ON SCHEMA %s TO %s, or let another role migrate",
			s.lack(), schema, role)
	case s.TableExists && !s.MayAlter:
		return fmt.Errorf("%s, and only the table's owner may change that: migrate as %s", s.lack(), quoteIdentifier(s.Owner))
	}
	return nil
}

func (s schemaState) lack() string {
	switch version, recorded := schemaVersionIn(s.Comment); {
	case !s.TableExists:
		return "the outbox is not there"
	case len(s.Missing) > 0:
		return "the outbox is not complete (no " + strings.Join(s.Missing, ", ") + ")"
	case !recorded:
		return "the comment that records the schema's version is not there"
	default:
		return fmt.Sprintf("the schema has version %d, this library needs %d", version, schemaVersion)
	}
}

func schemaComment(version int) string {
	return "watermill-pgoutbox schema " + strconv.Itoa(version)
}

var schemaCommentPattern = regexp.MustCompile(`watermill-pgoutbox schema (\d{1,9})\b`)

// schemaVersionIn finds the version anywhere in the comment, so that an operator may add a text of his own.
func schemaVersionIn(comment string) (version int, recorded bool) {
	match := schemaCommentPattern.FindStringSubmatch(comment)
	if match == nil {
		return 0, false
	}
	version, err := strconv.Atoi(match[1])
	return version, err == nil
}
