package faults

import (
	"encoding/binary"
	"errors"
	"io"
)

// Message is one message of PostgreSQL's protocol as it travels: type, length, body. The first one of a client has no type.
type Message []byte

// Type is the letter of the protocol's documentation, 0 for the first message of a client.
func (m Message) Type() byte { return m[0] }

const (
	header     = 5
	maxMessage = 1 << 30
)

// readMessage reads the next message.
func readMessage(from io.Reader) (Message, error) {
	m := make(Message, header)
	if _, err := io.ReadFull(from, m); err != nil {
		return nil, err
	}
	return readBody(from, m, 1)
}

// readFirst reads the message that has no type; a start-up packet's first byte is 0, which is also what Type says.
func readFirst(from io.Reader) (Message, error) {
	m := make(Message, header-1)
	if _, err := io.ReadFull(from, m); err != nil {
		return nil, err
	}
	return readBody(from, m, 0)
}

// readBody appends to a header what its length, which counts itself, announces.
func readBody(from io.Reader, m Message, at int) (Message, error) {
	length := int(binary.BigEndian.Uint32(m[at:]))
	if length < 4 || length > maxMessage {
		return nil, errors.New("that is not PostgreSQL's protocol")
	}
	read := len(m)
	m = append(m, make([]byte, at+length-read)...)
	_, err := io.ReadFull(from, m[read:])
	return m, err
}

// With returns the message with another body.
func (m Message) With(body []byte) Message {
	out := append(Message{m[0]}, 0, 0, 0, 0)
	binary.BigEndian.PutUint32(out[1:], uint32(len(body)+header-1))
	return append(out, body...)
}

// Body is what follows type and length.
func (m Message) Body() []byte { return m[header:] }
