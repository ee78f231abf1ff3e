package pgoutbox

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestOnlyTheServersRefusalIsKnownNotToBeStored(t *testing.T) {
	tests := []struct {
		name string
		err  error
		want bool
	}{
		{"refused by the server", &pgconn.PgError{SeverityUnlocalized: "ERROR", Severity: "FEHLER", Code: "42P01"}, false},
		{"refused, wrapped", fmt.Errorf("x: %w", &pgconn.PgError{SeverityUnlocalized: "ERROR"}), false},
		{"session terminated", &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: "57P01"}, true},
		{"connection lost", io.ErrUnexpectedEOF, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := mayBeStored(tt.err); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

type otherDriversError string

func (e otherDriversError) Error() string    { return "theirs" }
func (e otherDriversError) SQLState() string { return string(e) }

func TestExplainSaysWhatToDo(t *testing.T) {
	n, err := newNames("s", `t"t`)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		err  error
		want string
	}{
		{&pgconn.PgError{Code: "42P01"}, "run Migrate"},
		{&pgconn.PgError{Code: "3F000"}, "run Migrate"},
		{&pgconn.PgError{Code: "42703"}, "run Migrate"},
		{&pgconn.PgError{Code: "42501"}, `GRANT INSERT (topic, key, uuid, metadata, payload) ON "s"."t""t"`},
		{fmt.Errorf("x: %w", otherDriversError("25P02")), "roll back"},
		{otherDriversError("25006"), "read-only"},
		{io.EOF, "EOF"},
	}
	for _, tt := range tests {
		got := n.explain(tt.err, 7)
		if !strings.Contains(got.Error(), tt.want) || !strings.Contains(got.Error(), `insert 7 messages into "s"."t""t"`) {
			t.Errorf("%v: %v does not say %q", tt.err, got, tt.want)
		}
		if !errors.Is(got, tt.err) {
			t.Errorf("%v does not wrap %v", got, tt.err)
		}
	}
}
