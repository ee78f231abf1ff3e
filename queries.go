package pgoutbox

import (
	"embed"
	"strings"
)

//go:embed internal/queries/*.sql
var queryFiles embed.FS

// query is one statement of internal/queries, by its file name, written for this outbox.
func (n names) query(name string) string {
	text, err := queryFiles.ReadFile("internal/queries/" + name + ".sql")
	if err != nil {
		return "SELECT 'no statement named " + strings.ReplaceAll(name, "'", "") + "'::void" // a test prepares them all
	}
	return n.statement(string(text))
}
