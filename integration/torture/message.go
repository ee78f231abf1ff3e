package torture

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// Message is one outbox message as its payload tells it.
type Message struct {
	ID      int64  `json:"id"`      // unique in a run, never used twice, not even after a rollback
	Key     string `json:"key"`     // "" has no key and no order
	Version int64  `json:"version"` // counts the committed messages of the key from 1
}

// errForeign is returned for a payload that the workload has not written.
var errForeign = errors.New("payload is not one of the workload's")

func (m Message) payload() []byte {
	return []byte(`{"id":` + strconv.FormatInt(m.ID, 10) + `,"key":` + strconv.Quote(m.Key) + `,"version":` + strconv.FormatInt(m.Version, 10) + `}`)
}

func (m Message) uuid() string { return "m" + strconv.FormatInt(m.ID, 10) }

// topic spreads messages over three topics, so that one key's order has to hold across topics.
func (m Message) topic() string { return "torture." + string(rune('a'+m.ID%3)) }

// column is the key as the outbox stores it: no key is NULL.
func (m Message) column() *string {
	if m.Key == "" {
		return nil
	}
	return &m.Key
}

// read returns the message of a delivery, or an error when the reader changed it on the way.
func read(d Delivery) (Message, error) {
	var m Message
	if err := json.Unmarshal(d.Payload, &m); err != nil || m.ID <= 0 {
		return Message{}, errForeign
	}
	if d.Key != m.Key || d.Topic != m.topic() {
		return m, fmt.Errorf("message %d came with topic %q and key %q instead of %q and %q", m.ID, d.Topic, d.Key, m.topic(), m.Key)
	}
	return m, nil
}
