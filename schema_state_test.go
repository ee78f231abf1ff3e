package pgoutbox

import (
	"strings"
	"testing"
)

func TestSchemaStateDecides(t *testing.T) {
	place := schemaState{
		ServerVersion: 150000, Role: "app", Database: "d", SchemaExists: true, TableExists: true, Owner: "own",
		Comment: schemaComment(schemaVersion), Columns: outboxColumns,
	}
	with := func(change func(*schemaState)) schemaState {
		s := place
		change(&s)
		return s
	}
	empty := schemaState{ServerVersion: 150000, Role: "app", Database: "d", Missing: []string{"outbox"}}
	tests := []struct {
		name    string
		state   schemaState
		current bool
		err     string // "" = none
	}{
		{"in place, for a role without rights", place, true, ""},
		{"with an operator's words in the comment", with(func(s *schemaState) { s.Comment = "Ours. " + s.Comment + " (do not drop)" }), true, ""},
		{"an old server", with(func(s *schemaState) { s.ServerVersion = 130012 }), false, "PostgreSQL 13"},
		{"a newer schema", with(func(s *schemaState) { s.Comment = schemaComment(schemaVersion + 1) }), false, "update the library"},
		{"a newer schema that looks like ours", with(func(s *schemaState) { s.Comment = schemaComment(schemaVersion*10 + 1) }), false, "update the library"},
		{"somebody's table", with(func(s *schemaState) { s.Comment, s.Columns = "", []string{"id"}; s.MayCreate, s.MayAlter = true, true }), false,
			"no column created_at, slot"},
		{"no schema, may create it", func() schemaState { s := empty; s.MayCreateSchema = true; return s }(), false, ""},
		{"no schema, may not", empty, false, `GRANT CREATE ON DATABASE "d" TO "app"`},
		{"no table, may create it", func() schemaState { s := empty; s.SchemaExists, s.MayCreate = true, true; return s }(), false, ""},
		{"no table, may not", func() schemaState { s := empty; s.SchemaExists = true; return s }(), false, `GRANT CREATE ON SCHEMA "s" TO "app"`},
		{"incomplete, owner", with(func(s *schemaState) { s.Missing = []string{"t_xid_id"}; s.MayCreate, s.MayAlter = true, true }), false, ""},
		{"incomplete, not the owner", with(func(s *schemaState) { s.Missing = []string{"t_xid_id"}; s.MayCreate = true }), false, `no t_xid_id`},
		{"no comment, not the owner", with(func(s *schemaState) { s.Comment = ""; s.MayCreate = true }), false, `migrate as "own"`},
	}
	n, err := newNames("s", "t")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			current, err := tt.state.current(n)
			if current != tt.current {
				t.Errorf("current is %v", current)
			}
			switch {
			case tt.err == "" && err != nil:
				t.Errorf("refused: %v", err)
			case tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)):
				t.Errorf("error %v does not say %q", err, tt.err)
			}
		})
	}
}

func TestSchemaSQLRecordsTheVersion(t *testing.T) {
	sql, err := SchemaSQL(SchemaConfig{Schema: `a\'b`, Table: "t"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`COMMENT ON TABLE "a\'b"."t" IS E'watermill-pgoutbox schema 2';`,
		`nspname = E'a\\''b'`, // a backslash and a quote, whatever standard_conforming_strings is
		`CREATE TABLE IF NOT EXISTS "a\'b"."t" (`,
	} {
		if !strings.Contains(sql, want) {
			t.Errorf("%q is missing", want)
		}
	}
	if strings.Contains(sql, "CREATE SCHEMA IF NOT EXISTS") {
		t.Error("creates the schema where it exists, which needs a right that nobody else does")
	}
	if _, err := SchemaSQL(SchemaConfig{Table: "\x00"}); err == nil {
		t.Error("a wrong name is accepted")
	}
}
