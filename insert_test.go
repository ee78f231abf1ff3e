package pgoutbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
)

func withMetadata(kv ...string) *message.Message {
	msg := message.NewMessage("u", nil)
	for i := 0; i < len(kv); i += 2 {
		msg.Metadata.Set(kv[i], kv[i+1])
	}
	return msg
}

func TestInsertRefusesBeforeTheServerDoes(t *testing.T) {
	const secret = "secret"
	tests := []struct {
		name  string
		topic string
		msg   *message.Message
		want  []string // in the error; none: accepted
	}{
		{"an ordinary message", "t", withMetadata("a", "b"), nil},
		{"a message without anything", "t", &message.Message{}, nil},
		{"text of every kind", "täg #", withMetadata("\x01\t\u2028", "<&>😀\"\\{},NULL"), nil},
		{"no topic", "", withMetadata(), []string{"topic is empty"}},
		{"the topic of all topics", "#", withMetadata(), []string{"topic", "#"}},
		{"a NUL in the topic", "t\x00" + secret, withMetadata(), []string{"topic contains a NUL"}},
		{"invalid UTF-8 in the topic", "t\xff" + secret, withMetadata(), []string{"topic is not valid UTF-8"}},
		{"no message", "t", nil, []string{"message 1", "nil"}},
		{"a NUL in the UUID", "t", message.NewMessage("\x00"+secret, nil), []string{"message 1", "uuid contains a NUL"}},
		{"invalid UTF-8 in the UUID", "t", message.NewMessage("\xed\xa0\x80"+secret, nil), []string{"message 1", "uuid is not valid"}},
		{"a NUL in the key", "t", withMetadata(OrderingKey+"2", secret+"\x00"), []string{"message 1", "metadata value contains a NUL"}},
		{"a NUL in a metadata key", "t", withMetadata(secret+"\x00", ""), []string{"message 1", "metadata key contains a NUL"}},
		{"invalid UTF-8 in a metadata key", "t", withMetadata("\xff", secret), []string{"message 1", "metadata key is not valid"}},
		{"invalid UTF-8 in a metadata value", "t", withMetadata("k", secret+"\xc0"), []string{"message 1", "metadata value is not valid"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, err := newInsert(tt.topic, []*message.Message{message.NewMessage("", nil), tt.msg}, keyFromMetadata)
			if len(tt.want) == 0 && err != nil {
				t.Fatalf("refused: %v", err)
			}
			for _, want := range tt.want {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("error %v does not say %q", err, want)
				}
			}
			if err != nil && strings.Contains(err.Error(), secret) {
				t.Errorf("error %v tells a value", err)
			}
		})
	}
}

func TestInsertAsksForTheKeyAndChecksIt(t *testing.T) {
	byPayload := func(topic string, msg *message.Message) string { return topic + string(msg.Payload) }
	msg := withMetadata(OrderingKey, "from metadata")
	msg.Payload = []byte("p")

	rows, err := newInsert("t", []*message.Message{msg}, byPayload)
	if err != nil || rows.keys[0] != "tp" || rows.metadata[0] != `{"ordering_key":"from metadata"}` {
		t.Errorf("key %q, metadata %s, error %v", rows.keys, rows.metadata, err)
	}
	rows, err = newInsert("t", []*message.Message{msg}, keyFromMetadata)
	if err != nil || rows.keys[0] != "from metadata" {
		t.Errorf("key %q, error %v", rows.keys, err)
	}
	msg.Payload = []byte("\xff")
	if _, err = newInsert("t", []*message.Message{msg}, byPayload); err == nil || !strings.Contains(err.Error(), "message 0: key is not valid") {
		t.Errorf("error %v", err)
	}
}

func TestInsertHasNoNulls(t *testing.T) {
	rows, err := newInsert("t", []*message.Message{{}}, keyFromMetadata)
	if err != nil {
		t.Fatal(err)
	}
	if rows.payloads[0] == nil || rows.metadata[0] != "{}" {
		t.Errorf("payload %v, metadata %s", rows.payloads[0], rows.metadata[0])
	}
}

func TestInsertNamesThePgxMode(t *testing.T) {
	if mode := (insert{}).arrayArgs()[0]; mode != pgx.QueryExecModeExec {
		t.Errorf("first argument is %v", mode)
	}
}

func TestInsertRefusesMoreThanTheServerReads(t *testing.T) {
	msg := message.NewMessage("", make([]byte, 1000))
	rows, err := newInsert("t", []*message.Message{msg, msg, msg}, keyFromMetadata)
	if err != nil {
		t.Fatal(err)
	}
	if err := rows.checkSize(false, 3200); err != nil {
		t.Errorf("refused as arrays: %v", err)
	}
	if err := rows.checkSize(true, 3200); err == nil {
		t.Error("as literals payloads double, but were not refused")
	}
	literal := len(fmt.Sprint(rows.literalArgs()...))
	if size := rows.size(true); size < literal {
		t.Errorf("estimated %d bytes for %d", size, literal)
	}
}

func TestArrayLiteral(t *testing.T) {
	tests := []struct {
		name     string
		elements []string
		want     string
	}{
		{"nothing", nil, `{}`},
		{"an empty text is not NULL", []string{""}, `{""}`},
		{"the word is not NULL", []string{"NULL", "null"}, `{"NULL","null"}`},
		{"separators", []string{"a,b", "{}", " "}, `{"a,b","{}"," "}`},
		{"quotes and backslashes", []string{`"`, `\`, `\"`}, `{"\"","\\","\\\""}`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := arrayLiteral(tt.elements); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
	if got, want := byteaArrayLiteral([][]byte{nil, {0, 0x9f}, []byte("a")}), `{"\\x","\\x009f","\\x61"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func FuzzArrayLiteralIsReadBack(f *testing.F) {
	f.Add("", `\`)
	f.Add(`","`, `{"a"}`)
	f.Fuzz(func(t *testing.T, a, b string) {
		got, err := readArrayLiteral(arrayLiteral([]string{a, b}))
		if err != nil || !slices.Equal(got, []string{a, b}) {
			t.Errorf("%q, %q came back as %q, %v", a, b, got, err)
		}
	})
}

// readArrayLiteral reads what the server's array input reads, if every element is quoted.
func readArrayLiteral(s string) ([]string, error) {
	var all []string
	rest, ok := strings.CutPrefix(s, "{")
	for ok && rest != "}" {
		if rest, ok = strings.CutPrefix(rest, `"`); !ok {
			break
		}
		var element []byte
		for len(rest) > 0 && rest[0] != '"' {
			if rest[0] == '\\' && len(rest) > 1 {
				rest = rest[1:]
			}
			element, rest = append(element, rest[0]), rest[1:]
		}
		all = append(all, string(element))
		rest, ok = strings.CutPrefix(rest, `"`)
		rest = strings.TrimPrefix(rest, ",")
	}
	if !ok {
		return nil, errors.New("malformed array literal")
	}
	return all, nil
}

func FuzzMetadataIsReadBackOrRefused(f *testing.F) {
	f.Add("k", "v")
	f.Add("\xff", "")
	f.Add("<", "\u2028")
	f.Fuzz(func(t *testing.T, k, v string) {
		text, err := marshalMetadata(message.Metadata{k: v})
		if err != nil {
			return
		}
		var got map[string]string
		if err := json.Unmarshal([]byte(text), &got); err != nil || len(got) != 1 || got[k] != v {
			t.Errorf("%q: %q came back as %q, %v", k, v, got, err)
		}
	})
}
