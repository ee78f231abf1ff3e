package pgoutbox

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

// Row says where a message came from.
type Row struct {
	ID        int64     // the row's id; unique in the table, ascending in causal order
	Shard     int       // the shard that the row's key belongs to
	Term      int64     // grows with every take-over of the shard; a later term's deliveries supersede an earlier one's
	Topic     string    // the topic it was published to
	Key       string    // the ordering key, "" when the row has none
	CreatedAt time.Time // when it was inserted, by the server's clock, in UTC
	Attempt   int       // 1 = first delivery by this term
}

// RowFromContext returns the row that a message was made from. It works on the context of every message a Subscriber or
// PublisherBridge hands out, and on contexts derived from it; false means that the message came from elsewhere.
func RowFromContext(ctx context.Context) (Row, bool) {
	c, ok := ctx.Value(rowKey{}).(*rowContext)
	if !ok {
		return Row{}, false
	}
	return c.row, true
}

// MessageID returns the identity of the row that a message was made from, for a broker's de-duplication: the same for
// every delivery of one row, different for any two rows, also when a server lost its last commits and used an id twice
// (it is made of id, transaction and creation time). "" means that the message came from elsewhere. Do not use the UUID
// for this: UUIDs may repeat.
func MessageID(ctx context.Context) string {
	c, ok := ctx.Value(rowKey{}).(*rowContext)
	if !ok {
		return ""
	}
	id := strconv.AppendInt(make([]byte, 0, 48), c.row.ID, 10)
	id = append(id, '-')
	id = strconv.AppendUint(id, c.xid, 10)
	id = append(id, '-')
	return string(strconv.AppendInt(id, c.row.CreatedAt.UnixMicro(), 10))
}

type rowKey struct{}

// rowContext adds the row to a context, in one allocation.
type rowContext struct {
	context.Context

	row    Row
	xid    uint64
	failed atomic.Pointer[error] // what a handler or RouteByTopic said
}

func (c *rowContext) Value(key any) any {
	if _, ok := key.(rowKey); ok {
		return c
	}
	return c.Context.Value(key)
}

// record is a row as it was read. metadata is PostgreSQL's text of a JSON object.
type record struct {
	id       int64
	xid      uint64
	slot     int
	created  time.Time
	topic    string
	key      string
	hasKey   bool
	uuid     string
	metadata string
	size     int // of the payload, in bytes
	payload  []byte
}

// message makes the Watermill message of a record. Nothing of it is shared with another message but the payload, which
// it takes over.
func (r *record) message() (*message.Message, error) {
	metadata, err := decodeMetadata(r.metadata)
	if err != nil {
		return nil, fmt.Errorf("metadata of row %d: %w", r.id, err)
	}
	if _, ok := metadata[OrderingKey]; r.hasKey && !ok {
		metadata[OrderingKey] = r.key
	}
	msg := message.NewMessage(r.uuid, r.payload)
	msg.Metadata = metadata
	return msg, nil
}

// decodeMetadata reads a JSON object. Strings come back as they are, any other value as its JSON text. PostgreSQL writes
// objects as {"key": "value", …}; what has neither escapes nor nested values, nearly everything, is read without a copy.
func decodeMetadata(text string) (message.Metadata, error) {
	out := message.Metadata{}
	rest, ok := strings.CutPrefix(text, "{")
	for ok && rest != "}" {
		var key, value string
		if key, rest, ok = plainString(rest); !ok {
			break
		}
		if rest, ok = strings.CutPrefix(rest, ": "); !ok {
			break
		}
		if value, rest, ok = plainString(rest); !ok {
			break
		}
		out[key] = value
		if rest == "}" {
			break
		}
		rest, ok = strings.CutPrefix(rest, ", ")
	}
	if ok {
		return out, nil
	}
	return decodeAnyMetadata(text)
}

// plainString cuts a JSON string without escapes off the front.
func plainString(text string) (value, rest string, ok bool) {
	if text == "" || text[0] != '"' {
		return "", "", false
	}
	end := strings.IndexByte(text[1:], '"') + 1
	if end == 0 {
		return "", "", false
	}
	value = text[1:end]
	return value, text[end+1:], strings.IndexByte(value, '\\') < 0
}

func decodeAnyMetadata(text string) (message.Metadata, error) {
	var raw map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &raw); err != nil {
		// The decoder's own words quote the text.
		return nil, fmt.Errorf("not a JSON object")
	}
	out := make(message.Metadata, len(raw))
	for key, value := range raw {
		var s string
		if value[0] != '"' || json.Unmarshal(value, &s) != nil {
			s = string(value)
		}
		out[key] = s
	}
	return out, nil
}
