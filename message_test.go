package pgoutbox

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
)

func TestMetadataIsReadFromPostgreSQLsText(t *testing.T) {
	tests := []struct {
		name, text string
		want       message.Metadata
	}{
		{"empty", `{}`, message.Metadata{}},
		{"one", `{"a": "b"}`, message.Metadata{"a": "b"}},
		{"several", `{"a": "b", "c": "d", "ordering_key": "k"}`, message.Metadata{"a": "b", "c": "d", "ordering_key": "k"}},
		{"empty key and value", `{"": ""}`, message.Metadata{"": ""}},
		{"text beyond ASCII", `{"clé": "значение 🙂"}`, message.Metadata{"clé": "значение 🙂"}},
		{"what looks like JSON", `{"a": "}", "b": ", ", "c": ": "}`, message.Metadata{"a": "}", "b": ", ", "c": ": "}},
		{"a quote", `{"a": "say \"hi\"", "b": "c"}`, message.Metadata{"a": `say "hi"`, "b": "c"}},
		{"a backslash at the end", `{"a": "\\", "b": "\\\\"}`, message.Metadata{"a": `\`, "b": `\\`}},
		{"a quote in a key", `{"a\"": "b"}`, message.Metadata{`a"`: "b"}},
		{"control characters", `{"a": "\b\f\n\r\t\u0001\u001f"}`, message.Metadata{"a": "\b\f\n\r\t\x01\x1f"}},
		{"a number", `{"a": 1.50, "b": -1e400, "c": "d"}`, message.Metadata{"a": "1.50", "b": "-1e400", "c": "d"}},
		{"a number first and last", `{"a": 1}`, message.Metadata{"a": "1"}},
		{"true, false and null", `{"a": true, "b": false, "c": null}`, message.Metadata{"a": "true", "b": "false", "c": "null"}},
		{"an object", `{"a": {"b": [1, "x", null]}, "c": {}}`, message.Metadata{"a": `{"b": [1, "x", null]}`, "c": "{}"}},
		{"an array", `{"a": ["b", {"c": "d"}], "e": []}`, message.Metadata{"a": `["b", {"c": "d"}]`, "e": "[]"}},
		{"the text of another value", `{"a": "null", "b": "1"}`, message.Metadata{"a": "null", "b": "1"}},
		{"the text form of json, not jsonb", `{ "a" : "b" ,"c":"d"}`, message.Metadata{"a": "b", "c": "d"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := decodeMetadata(tt.text)
			if err != nil || got == nil || !maps.Equal(got, tt.want) {
				t.Errorf("got %q (%v), want %q", got, err, tt.want)
			}
		})
	}
}

func TestMetadataThatIsNoObjectIsRefusedWithoutItsContents(t *testing.T) {
	for _, text := range []string{
		``, `[]`, `"secret"`, `{"secret`, `{"a": "secret"`, `{"a": "secret"]`, `{"a": secret}`, `{"a" "secret"}`, `{"a": "secret"}}`, `["secret"]`,
		`{"a": "secret\q"}`, `{secret: "a"}`,
	} {
		r := record{id: 77, metadata: text, uuid: "secret", topic: "secret", payload: []byte("secret")}
		_, err := r.message()
		if err == nil {
			t.Errorf("%q was read", text)
			continue
		}
		if said := err.Error(); strings.Contains(said, "secret") || !strings.Contains(said, "77") {
			t.Errorf("%q: %q tells what it must not, or not which row", text, said)
		}
	}
}

// postgresText writes an object as PostgreSQL writes jsonb: shorter keys first, a blank after colons and commas, and escapes
// for quotes, backslashes and control characters only.
func postgresText(metadata map[string]json.RawMessage) string {
	keys := slices.SortedFunc(maps.Keys(metadata), func(a, b string) int {
		if len(a) != len(b) {
			return len(a) - len(b)
		}
		return strings.Compare(a, b)
	})
	var out strings.Builder
	out.WriteByte('{')
	for i, key := range keys {
		if i > 0 {
			out.WriteString(", ")
		}
		out.WriteString(postgresString(key))
		out.WriteString(": ")
		out.Write(metadata[key])
	}
	out.WriteByte('}')
	return out.String()
}

func postgresString(s string) string {
	var out strings.Builder
	out.WriteByte('"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			out.WriteByte('\\')
			out.WriteRune(r)
		case r < ' ':
			fmt.Fprintf(&out, `\u%04x`, r)
		default:
			out.WriteRune(r)
		}
	}
	out.WriteByte('"')
	return out.String()
}

func FuzzMetadataComesBackAsItWasPublished(f *testing.F) {
	f.Add("a", "b", "c", "d")
	f.Add("", "", `"`, `\`)
	f.Add("é", "\n", `\\"`, "}, {")
	f.Fuzz(func(t *testing.T, key1, value1, key2, value2 string) {
		want := message.Metadata{key1: value1, key2: value2}
		raw := map[string]json.RawMessage{}
		for key, value := range want {
			if !utf8.ValidString(key) || !utf8.ValidString(value) {
				return // refused when it is published
			}
			raw[key] = json.RawMessage(postgresString(value))
		}
		got, err := decodeMetadata(postgresText(raw))
		if err != nil || !maps.Equal(got, want) {
			t.Errorf("%q came back as %q (%v)", want, got, err)
		}
	})
}

func FuzzMetadataIsReadAsEncodingJSONReadsIt(f *testing.F) {
	for _, text := range []string{
		`{}`, `{"a": "b"}`, `{"a": "b", "c": "d"}`, `{"a": 1, "b": [true, null]}`, `{"a": "\"\\\u0041"}`, ` { "a" : { } } `, `{"a": "b", }`, `{"a"`, `null`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var raw map[string]json.RawMessage
		if json.Unmarshal([]byte(text), &raw) != nil || !utf8.ValidString(text) {
			_, _ = decodeMetadata(text) // never in the table; it must not panic
			return
		}
		got, err := decodeMetadata(text)
		if err != nil || len(got) != len(raw) {
			t.Fatalf("%q became %q (%v)", text, got, err)
		}
		for key, value := range raw {
			want := string(value)
			if value[0] == '"' {
				if err := json.Unmarshal(value, &want); err != nil {
					t.Fatal(err)
				}
			}
			if got[key] != want {
				t.Errorf("%q: %q is %q, want %q", text, key, got[key], want)
			}
		}
	})
}

func TestMessageHasTheKeyOfItsRowUnlessItsMetadataSaysOtherwise(t *testing.T) {
	tests := []struct {
		name     string
		key      string
		hasKey   bool
		metadata string
		want     message.Metadata
	}{
		{"no key", "", false, `{"a": "b"}`, message.Metadata{"a": "b"}},
		{"key of the row only", "k", true, `{"a": "b"}`, message.Metadata{"a": "b", OrderingKey: "k"}},
		{"key of the row, no metadata", "k", true, `{}`, message.Metadata{OrderingKey: "k"}},
		{"the same in the metadata", "k", true, `{"ordering_key": "k"}`, message.Metadata{OrderingKey: "k"}},
		{"another in the metadata", "k", true, `{"ordering_key": "other"}`, message.Metadata{OrderingKey: "other"}},
		{"an empty one in the metadata", "k", true, `{"ordering_key": ""}`, message.Metadata{OrderingKey: ""}},
		{"in the metadata only", "", false, `{"ordering_key": "k"}`, message.Metadata{OrderingKey: "k"}},
		{"the empty key", "", true, `{}`, message.Metadata{OrderingKey: ""}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := record{id: 1, key: tt.key, hasKey: tt.hasKey, metadata: tt.metadata, uuid: "u", payload: []byte("p")}
			msg, err := r.message()
			if err != nil || !maps.Equal(msg.Metadata, tt.want) || msg.UUID != "u" || string(msg.Payload) != "p" {
				t.Errorf("got %+v (%v), want metadata %q", msg, err, tt.want)
			}
		})
	}
}

func TestMessagesOfOneRowShareNoMetadata(t *testing.T) {
	r := record{id: 1, metadata: `{"a": "b"}`}
	first, err := r.message()
	if err != nil {
		t.Fatal(err)
	}
	first.Metadata.Set("a", "changed")
	first.Nack()
	second, err := r.message()
	if err != nil || second.Metadata.Get("a") != "b" || !second.Ack() {
		t.Errorf("the second message has %q (%v), or is nacked already", second.Metadata, err)
	}
}

func TestMessageIDTellsAnyTwoRowsApart(t *testing.T) {
	ids := []int64{math.MinInt64, -1, 0, 1, 2, 11, 12, 112, math.MaxInt64}
	xids := []uint64{0, 1, 2, 11, 12, 21, 112, math.MaxUint64}
	var times []time.Time
	for _, micros := range []int64{-12, -1, 0, 1, 2, 11, 12, 1_700_000_000_000_000, 1_700_000_000_000_001} {
		times = append(times, time.UnixMicro(micros).UTC())
	}
	times = append(times, time.Time{})
	seen := map[string]string{}
	for _, id := range ids {
		for _, xid := range xids {
			for _, created := range times {
				row := fmt.Sprint(id, xid, created)
				// Neither place nor attempt make another row of it.
				ctx := &rowContext{Context: context.Background(), row: Row{ID: id, CreatedAt: created, Shard: 1, Term: 1, Attempt: 1}, xid: xid}
				again := &rowContext{
					Context: context.Background(), xid: xid,
					row: Row{ID: id, CreatedAt: created.In(time.FixedZone("", 3600)), Shard: 2, Term: 9, Attempt: 4, Topic: "t", Key: "k"},
				}
				got := MessageID(ctx)
				if other, taken := seen[got]; taken || got == "" {
					t.Fatalf("%q is the id of %s and of %s", got, row, other)
				}
				seen[got] = row
				if MessageID(again) != got {
					t.Fatalf("%s is %q, and later %q", row, got, MessageID(again))
				}
			}
		}
	}
}

func TestRowIsFoundInDerivedContextsOnly(t *testing.T) {
	type key struct{}
	row := Row{ID: 7, Topic: "t", Key: "k", Attempt: 2}
	parent := context.WithValue(context.Background(), key{}, "value")
	derived, cancel := context.WithCancel(&rowContext{Context: parent, row: row, xid: 9})
	defer cancel()
	if got, ok := RowFromContext(derived); !ok || got != row {
		t.Errorf("got %+v, %v", got, ok)
	}
	if MessageID(derived) != "7-9-"+fmt.Sprint(row.CreatedAt.UnixMicro()) || derived.Value(key{}) != "value" {
		t.Errorf("got %q, %v", MessageID(derived), derived.Value(key{}))
	}
	if got, ok := RowFromContext(parent); ok || MessageID(parent) != "" {
		t.Errorf("a message from elsewhere has row %+v, id %q", got, MessageID(parent))
	}
}

func TestMessageTakesThePayloadAsItIs(t *testing.T) {
	for _, payload := range [][]byte{nil, {}, {0}, []byte("text"), bytes.Repeat([]byte{0xff}, 1<<20)} {
		r := record{metadata: "{}", payload: payload}
		msg, err := r.message()
		if err != nil || !bytes.Equal(msg.Payload, payload) {
			t.Errorf("%d bytes became %d (%v)", len(payload), len(msg.Payload), err)
		}
	}
}
