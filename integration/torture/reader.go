package torture

import (
	"context"
	"errors"
)

// Reader is what the harness tortures. Run reads the outbox of the database at dsn and hands every row to deliver until
// ctx ends, then returns nil. It survives lost connections by itself; any other return is held against it.
//
// When the cause of ctx's end is ErrKilled, Run drops everything at once, as a process does that gets SIGKILL. After any
// other cause it stops as it would in a deployment, and may finish what is in flight.
type Reader interface {
	Run(ctx context.Context, dsn string, deliver Deliver) error
}

// Deliver logs a delivery and returns its ack. Calls may overlap; of one key only the order of the calls counts.
type Deliver func(Delivery) Ack

// Ack waits as long as the handler of the delivery takes. Nil means acknowledged, an error means deliver it again.
type Ack func(context.Context) error

// Delivery is one row in a reader's hands.
type Delivery struct {
	Row     int64  `json:"row"`
	Topic   string `json:"topic"`
	Key     string `json:"key"`
	Payload []byte `json:"payload"`
}

var (
	// ErrKilled is the cause of a reader's context when it is to die without a farewell.
	ErrKilled = errors.New("torture: reader killed")
	// ErrRestarted is the cause of a reader's context when it is stopped in an orderly way and started again.
	ErrRestarted = errors.New("torture: reader restarted")
	// ErrRefused is returned by an ack that stands for a failed handler.
	ErrRefused = errors.New("torture: delivery refused")
)
