package pgoutbox

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// statementFiles returns the statements of internal/queries as they are written, by name.
func statementFiles(t *testing.T) map[string]string {
	t.Helper()
	files, err := queryFiles.ReadDir("internal/queries")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, file := range files {
		text, err := queryFiles.ReadFile("internal/queries/" + file.Name())
		if err != nil {
			t.Fatal(err)
		}
		out[strings.TrimSuffix(file.Name(), ".sql")] = string(text)
	}
	return out
}

// queriesInUse returns the names that the package asks names.query for.
func queriesInUse(t *testing.T) map[string]bool {
	t.Helper()
	files, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, file := range files {
		if !strings.HasSuffix(file.Name(), ".go") || strings.HasSuffix(file.Name(), "_test.go") {
			continue
		}
		source, err := parser.ParseFile(token.NewFileSet(), file.Name(), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(source, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			if f, ok := call.Fun.(*ast.SelectorExpr); !ok || f.Sel.Name != "query" || len(call.Args) != 1 {
				return true
			}
			literal, ok := call.Args[0].(*ast.BasicLit)
			if !ok {
				t.Errorf("%s asks for a statement whose name is not written there", file.Name())
				return true
			}
			name, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Errorf("%s asks for the statement %s: %v", file.Name(), literal.Value, err)
			}
			out[name] = true
			return true
		})
	}
	return out
}

func TestEveryStatementIsUsedAndEveryUsedOneExists(t *testing.T) {
	written, used := slices.Sorted(maps.Keys(statementFiles(t))), slices.Sorted(maps.Keys(queriesInUse(t)))
	if len(written) == 0 || !slices.Equal(written, used) {
		t.Errorf("internal/queries has %v\nthe package uses    %v", written, used)
	}
}

var (
	parameter      = regexp.MustCompile(`\$([0-9]+)`)
	parameterRange = regexp.MustCompile(`\$([0-9]+) to \$([0-9]+)`)
)

// parameters lists the numbers of the parameters that a text names; "$5 to $8" names four.
func parameters(t *testing.T, text string) []int {
	t.Helper()
	number := func(digits string) int {
		n, err := strconv.Atoi(digits)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	set := map[int]bool{}
	for _, match := range parameter.FindAllStringSubmatch(text, -1) {
		set[number(match[1])] = true
	}
	for _, match := range parameterRange.FindAllStringSubmatch(text, -1) {
		for n := number(match[1]); n <= number(match[2]); n++ {
			set[n] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

func TestEveryStatementSaysWhatItReturnsAndWhatItTakes(t *testing.T) {
	n, err := newNames("s", "t")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range statementFiles(t) {
		t.Run(name, func(t *testing.T) {
			var header strings.Builder
			body := text
			for strings.HasPrefix(body, "--") {
				line, rest, _ := strings.Cut(body, "\n")
				header.WriteString(strings.TrimPrefix(line, "--") + "\n")
				body = rest
			}
			if !strings.HasPrefix(header.String(), " "+name+" ") || len(strings.Fields(header.String())) < 6 {
				t.Errorf("the comment does not begin with the statement's name and what it does:\n%s", header.String())
			}
			statement := n.query(name)
			said, used := parameters(t, strings.ReplaceAll(header.String(), "\n", "")), parameters(t, statement)
			if !slices.Equal(said, used) {
				t.Errorf("the comment names the parameters %v, the statement takes %v", said, used)
			}
			for i, number := range used {
				if number != i+1 {
					t.Errorf("parameters %v are not numbered from 1 on", used)
					break
				}
			}
			if strings.Contains(statement, "--") || strings.Contains(statement, ";") {
				t.Errorf("more than one bare statement:\n%s", statement)
			}
			if strings.Contains(statement, `"public"`) || strings.Contains(statement, `"outbox`) {
				t.Errorf("not written for the configured names:\n%s", statement)
			}
		})
	}
}

func TestUnknownStatementCannotRun(t *testing.T) {
	n, err := newNames("", "")
	if err != nil {
		t.Fatal(err)
	}
	if got := n.query("no' such"); !strings.Contains(got, "no statement named no such") || !strings.Contains(got, "::void") {
		t.Errorf("got %q", got)
	}
}
