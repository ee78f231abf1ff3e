package pgoutbox

import (
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"unicode/utf8"
)

// names is where one outbox lives: the schema, and the table whose name every other object's name starts with. Only
// newNames makes one, so a names value is safe to write into SQL.
type names struct {
	schema, table string
}

const (
	defaultSchema = "public"
	defaultTable  = "outbox"

	maxIdentifier = 63 // bytes; the server cuts longer names without an error, and two outboxes become one
	dollarTag     = "$pgoutbox$"
)

//go:embed schema.sql
var schemaSource string

// newNames checks what the user configured; "" is the default. Its error tells about every problem and names the fields.
func newNames(schema, table string) (names, error) {
	n := names{schema: schema, table: table}
	if n.schema == "" {
		n.schema = defaultSchema
	}
	if n.table == "" {
		n.table = defaultTable
	}
	return n, errors.Join(checkSchemaName(n.schema), checkTableName(n.table))
}

func checkSchemaName(name string) error {
	const field = "Schema"
	if err := checkIdentifier(field, name); err != nil {
		return err
	}
	if len(name) > maxIdentifier {
		return fmt.Errorf("%s is %d bytes long, PostgreSQL takes %d", field, len(name), maxIdentifier)
	}
	if strings.HasPrefix(name, "pg_") { // pg_temp would even work, for one session
		return fmt.Errorf("%s %q: PostgreSQL keeps names that start with pg_ for itself", field, name)
	}
	return nil
}

func checkTableName(name string) error {
	const field = "Table"
	if err := checkIdentifier(field, name); err != nil {
		return err
	}
	if limit := maxIdentifier - len(longestSuffix()); len(name) > limit {
		return fmt.Errorf("%s is %d bytes long, at most %d leave room for the derived name …%s", field, len(name), limit, longestSuffix())
	}
	return nil
}

func checkIdentifier(field, name string) error {
	switch {
	case !utf8.ValidString(name):
		return fmt.Errorf("%s is not valid UTF-8", field)
	case strings.ContainsRune(name, 0):
		return fmt.Errorf("%s contains a NUL byte", field)
	case strings.Contains(name, dollarTag):
		return fmt.Errorf("%s contains %s, which quotes the bodies of our functions", field, dollarTag)
	}
	return nil
}

// quoted returns the qualified and quoted name of the table ("") or of an object derived from it ("_cursors").
func (n names) quoted(suffix string) string {
	return quoteIdentifier(n.schema) + "." + quoteIdentifier(n.table+suffix)
}

func quoteIdentifier(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

// sqlToken matches a comment, a string literal, or a double-quoted identifier. Comments and literals are matched to be
// left alone: a name with a line break in it would end the comment and run as SQL.
var sqlToken = regexp.MustCompile(`--[^\n]*|'(?:[^']|'')*'|"(?:[^"]|"")*"`)

// rewrite turns SQL that is written for "public"."outbox" into the same SQL for n. It replaces exactly the double-quoted
// "public", "outbox" and "outbox_…"; what comments and string literals say stays.
func (n names) rewrite(sql string) string {
	return sqlToken.ReplaceAllStringFunc(sql, func(token string) string {
		if token == `"`+defaultSchema+`"` {
			return quoteIdentifier(n.schema)
		}
		if suffix, ok := derivedSuffix(token); ok {
			return quoteIdentifier(n.table + suffix)
		}
		return token
	})
}

// derivedSuffix returns "" for the token "outbox", "_cursors" for "outbox_cursors"; false for any other token.
func derivedSuffix(token string) (string, bool) {
	rest, ok := strings.CutPrefix(token, `"`+defaultTable)
	if !ok {
		return "", false
	}
	suffix, ok := strings.CutSuffix(rest, `"`)
	return suffix, ok && (suffix == "" || suffix[0] == '_')
}

// statement is rewrite for one of internal/queries: without its comments, which would cross the wire with every call, and
// whose $1 a driver that interpolates on the client's side would fill in.
func (n names) statement(sql string) string {
	bare := sqlToken.ReplaceAllStringFunc(sql, func(token string) string {
		if strings.HasPrefix(token, "--") {
			return ""
		}
		return token
	})
	return n.rewrite(strings.TrimRight(strings.TrimSpace(bare), ";"))
}

// derivedNames lists the names of everything that schema.sql creates, in the order in which it mentions them first: table,
// sequence, index, constraint and function names.
func (n names) derivedNames() []string {
	var all []string
	for _, suffix := range suffixes() {
		all = append(all, n.table+suffix)
	}
	return all
}

// suffixes are what schema.sql appends to the table's name; "" is among them.
var suffixes = sync.OnceValue(func() []string {
	var all []string
	seen := map[string]bool{}
	for _, token := range sqlToken.FindAllString(schemaSource, -1) {
		if suffix, ok := derivedSuffix(token); ok && !seen[suffix] {
			seen[suffix] = true
			all = append(all, suffix)
		}
	}
	return all
})

func longestSuffix() string {
	longest := ""
	for _, suffix := range suffixes() {
		if len(suffix) > len(longest) {
			longest = suffix
		}
	}
	return longest
}
