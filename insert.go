package pgoutbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
)

// maxStatement is a little below the largest message that the server reads, 1 GiB. To send more would cost the connection,
// and with it the user's transaction.
const maxStatement = 1<<30 - 1<<16

// insert is what one Publish writes: a column each, a message a position.
type insert struct {
	topic    string
	keys     []string // "" = no key
	uuids    []string
	metadata []string // JSON objects
	payloads [][]byte // none is nil: that would be NULL
}

// newInsert refuses, before anything is sent, what the server would refuse after: there it would abort the transaction. The
// error names the field and the position of the message, and no value.
func newInsert(topic string, messages []*message.Message, key func(string, *message.Message) string) (insert, error) {
	if err := checkTopic(topic); err != nil {
		return insert{}, err
	}
	rows := insert{
		topic:    topic,
		keys:     make([]string, len(messages)),
		uuids:    make([]string, len(messages)),
		metadata: make([]string, len(messages)),
		payloads: make([][]byte, len(messages)),
	}
	for i, msg := range messages {
		if err := rows.set(i, msg, key); err != nil {
			return insert{}, fmt.Errorf("message %d: %w", i, err)
		}
	}
	return rows, nil
}

func checkTopic(topic string) error {
	switch topic {
	case "":
		return errors.New("topic is empty")
	case AllTopics:
		return fmt.Errorf("topic %q means every topic, one cannot publish to it", AllTopics)
	}
	return checkText("topic", topic)
}

func (r insert) set(i int, msg *message.Message, key func(string, *message.Message) string) error {
	if msg == nil {
		return errors.New("is nil")
	}
	r.uuids[i], r.payloads[i] = msg.UUID, msg.Payload
	if msg.Payload == nil {
		r.payloads[i] = []byte{}
	}
	if err := checkText("uuid", msg.UUID); err != nil {
		return err
	}
	var err error
	if r.metadata[i], err = marshalMetadata(msg.Metadata); err != nil {
		return err
	}
	r.keys[i] = key(r.topic, msg)
	return checkText("key", r.keys[i])
}

func marshalMetadata(metadata message.Metadata) (string, error) {
	if len(metadata) == 0 {
		return "{}", nil // a nil map would be null, which is no object
	}
	for k, v := range metadata {
		if err := checkText("a metadata key", k); err != nil {
			return "", err
		}
		if err := checkText("a metadata value", v); err != nil {
			return "", err
		}
	}
	text, err := json.Marshal(metadata)
	return string(text), err
}

// checkText: PostgreSQL stores any text but these two. JSON would even turn the second into another text, silently.
func checkText(field, text string) error {
	if strings.IndexByte(text, 0) >= 0 {
		return fmt.Errorf("%s contains a NUL byte", field)
	}
	if !utf8.ValidString(text) {
		return fmt.Errorf("%s is not valid UTF-8", field)
	}
	return nil
}

// size estimates the bytes of the statement's parameters; as array literals payloads double.
func (r insert) size(literals bool) int {
	perByte := 1
	if literals {
		perByte = 2
	}
	total := len(r.topic)
	for i := range r.payloads {
		total += 32 + len(r.keys[i]) + len(r.uuids[i]) + len(r.metadata[i]) + perByte*len(r.payloads[i])
	}
	return total
}

func (r insert) checkSize(literals bool, limit int) error {
	if size := r.size(literals); size > limit {
		return fmt.Errorf("%d messages make a statement of %d bytes, the server takes %d: publish fewer at once", len(r.uuids), size, limit)
	}
	return nil
}

// arrayArgs is for pgx. The mode is named because the pool's default may be one that prepares statements, which PgBouncer
// in transaction mode loses, or the simple protocol, which would send payloads as text.
func (r insert) arrayArgs() []any {
	return []any{pgx.QueryExecModeExec, r.topic, r.keys, r.uuids, r.metadata, r.payloads}
}

// literalArgs is for any database/sql driver: they agree on strings, and on nothing about arrays.
func (r insert) literalArgs() []any {
	return []any{r.topic, arrayLiteral(r.keys), arrayLiteral(r.uuids), arrayLiteral(r.metadata), byteaArrayLiteral(r.payloads)}
}

func arrayLiteral(elements []string) string {
	escape := strings.NewReplacer(`\`, `\\`, `"`, `\"`)
	var b strings.Builder
	b.WriteByte('{')
	for i, element := range elements {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteByte('"') // quoted always: bare, an empty element, a blank or the word NULL would mean something else
		_, _ = escape.WriteString(&b, element)
		b.WriteByte('"')
	}
	b.WriteByte('}')
	return b.String()
}

func byteaArrayLiteral(elements [][]byte) string {
	const digits = "0123456789abcdef"
	size := 2
	for _, element := range elements {
		size += len(`"\\x",`) + 2*len(element)
	}
	b := make([]byte, 0, size)
	b = append(b, '{')
	for i, element := range elements {
		if i > 0 {
			b = append(b, ',')
		}
		b = append(b, `"\\x`...)
		for _, c := range element {
			b = append(b, digits[c>>4], digits[c&15])
		}
		b = append(b, '"')
	}
	return string(append(b, '}'))
}
