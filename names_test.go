package pgoutbox

import (
	"regexp"
	"strings"
	"testing"
)

func TestNamesRefusesWhatCannotBeAName(t *testing.T) {
	tests := []struct {
		name          string
		schema, table string
		want          []string // each in the error; none: accepted
	}{
		{name: "the defaults"},
		{name: "quotes, dots, spaces and upper case", schema: `My "own".schema`, table: `Out'box; --`},
		{name: "line breaks and dollars", schema: "a\nb", table: "$1$$ $pgoutbox"},
		{name: "the longest names", schema: strings.Repeat("s", 63), table: strings.Repeat("t", 46)},
		{name: "the longest names in bytes", schema: strings.Repeat("é", 31), table: strings.Repeat("é", 23)},
		{name: "a schema too long", schema: strings.Repeat("s", 64), want: []string{"Schema is 64 bytes"}},
		{name: "bytes count, not characters", table: strings.Repeat("é", 24), want: []string{"Table is 48 bytes", "_consumers_id_seq"}},
		{name: "a NUL", schema: "a\x00", table: "\x00b", want: []string{"Schema contains a NUL", "Table contains a NUL"}},
		{name: "invalid UTF-8", schema: "a\xff", table: "\xc3", want: []string{"Schema is not valid", "Table is not valid"}},
		{name: "the dollar tag", schema: "$pgoutbox$", table: "x$pgoutbox$; DROP TABLE y", want: []string{"Schema contains $pgoutbox$", "Table contains $pgoutbox$"}},
		{name: "the server's own schemas", schema: "pg_temp", want: []string{`Schema "pg_temp"`}},
		{name: "every problem at once", schema: "pg_x", table: strings.Repeat("t", 47), want: []string{"Schema", "Table"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newNames(tt.schema, tt.table)
			if len(tt.want) == 0 && err != nil {
				t.Fatalf("refused: %v", err)
			}
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v does not say %q", err, want)
				}
			}
		})
	}
}

func TestNamesRewriteReplacesExactlyOurNames(t *testing.T) {
	tests := []struct{ name, sql, want string }{
		{"table", `FROM "public"."outbox"`, `FROM "s"."t"`},
		{"derived", `"public"."outbox_cursors" "outbox_id_seq"`, `"s"."t_cursors" "t_id_seq"`},
		{"other identifiers", `"outboxes" "my_outbox" "publicity" outbox public`, `"outboxes" "my_outbox" "publicity" outbox public`},
		{"quotes inside an identifier", `"a""public""b"`, `"a""public""b"`},
		{"literals", `'"public"' 'it''s "outbox"' "outbox"`, `'"public"' 'it''s "outbox"' "t"`},
		{"comments", "-- it's \"public\"\n\"outbox\"", "-- it's \"public\"\n\"t\""},
		{"function bodies", `$pgoutbox$ "outbox" $pgoutbox$`, `$pgoutbox$ "t" $pgoutbox$`},
	}
	n, err := newNames("s", "t")
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := n.rewrite(tt.sql); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestNamesRewriteKeepsTheDefault(t *testing.T) {
	n, err := newNames("", "")
	if err != nil {
		t.Fatal(err)
	}
	if got := n.rewrite(schemaSource); got != schemaSource {
		t.Error("public.outbox is not what schema.sql is written for")
	}
}

func TestNamesStatementHasNoComments(t *testing.T) {
	n, err := newNames("s", "t")
	if err != nil {
		t.Fatal(err)
	}
	got := n.statement("-- says $1 and it's \"outbox\"\nSELECT '--', id -- why\nFROM \"public\".\"outbox\"\nWHERE id = $1;\n")
	if want := "SELECT '--', id \nFROM \"s\".\"t\"\nWHERE id = $1"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestNamesDeriveEverythingThatTheSchemaCreates(t *testing.T) {
	n, err := newNames("", "x")
	if err != nil {
		t.Fatal(err)
	}
	all := strings.Join(n.derivedNames(), " ") + " "
	for _, want := range []string{
		"x ", "x_id_seq ", "x_pkey ", "x_readable ", "x_xid_id ", "x_consumers ", "x_consumers_id_seq ", "x_consumers_pkey ",
		"x_consumers_name ", "x_cursors ", "x_cursors_pkey ", "x_epochs ", "x_epochs_pkey ", "x_publish ", "x_publish_bytes ",
	} {
		if !strings.Contains(all, want) {
			t.Errorf("%q is missing in %s", want, all)
		}
	}
}

// structure is SQL without what a name may change: every quoted identifier and every literal is one character.
func structure(sql string) string {
	return regexp.MustCompile(`"(?:[^"]|"")*"|E?'(?:[^']|'')*'`).ReplaceAllStringFunc(sql, func(token string) string {
		if strings.HasPrefix(token, `"`) {
			return "I"
		}
		return "L"
	})
}

func FuzzNamesNeverChangeTheStructureOfSQL(f *testing.F) {
	for _, name := range []string{
		"outbox", `x"; DROP TABLE y; --`, "x\n; DROP TABLE y; --", `x\`, `x\'; DROP TABLE y; --`, "x' || 'y", "$$", "$pgoutbox", "pgoutbox$",
		"$pgoutbox$; DROP TABLE y", "/*", "*/", "--", "U&", "${1}", "$1", `""`, `"outbox"`, `public`, "é", "\x00", "\xff", " ",
	} {
		f.Add(name, name)
	}
	plain, err := newNames("", "")
	if err != nil {
		f.Fatal(err)
	}
	// Comments go first: nothing of a name is ever in one, which the comparison of them as they are would prove too, but a
	// quote in a comment confuses structure.
	bare := func(n names) string { return structure(n.statement(n.ddl())) }
	want := bare(plain)
	f.Fuzz(func(t *testing.T, schema, table string) {
		n, err := newNames(schema, table)
		if err != nil {
			return
		}
		if got := bare(n); got != want {
			t.Errorf("%q.%q changes the structure:\n%s", schema, table, got)
		}
		if strings.Count(n.ddl(), dollarTag) != strings.Count(plain.ddl(), dollarTag) {
			t.Errorf("%q.%q closes a function body", schema, table)
		}
		if got, want := comments(n.ddl()), comments(plain.ddl()); got != want {
			t.Errorf("%q.%q is in a comment:\n%s", schema, table, got)
		}
	})
}

// comments returns the lines that begin like a comment, without those inside a quoted identifier.
func comments(sql string) string {
	var all []string
	for _, token := range sqlToken.FindAllString(sql, -1) {
		if strings.HasPrefix(token, "--") {
			all = append(all, token)
		}
	}
	return strings.Join(all, "\n")
}
