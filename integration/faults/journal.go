package faults

import (
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// Journal keeps what was delivered.
type Journal = outboxtest.Record[Delivery]

// NewJournal makes an empty one.
func NewJournal() *Journal { return &Journal{} }

// Delivery is one row in the hands of a child's handler or publisher.
type Delivery struct {
	At    time.Time // by the child, when it had the row
	PID   int
	Shard int
	Term  int64
	ID    int64
	Key   string
}
