package pgoutbox

import (
	"fmt"
	"strconv"
)

// tick is one look at the server: what had ended, and how far ids had gone. One tick serves every consumer and shard of
// the lock session it was read on.
type tick struct {
	snapshot

	n     uint64 // counts the ticks of this process; a tick taken after an event has a higher one
	stray int64  // the highest id known to lie above the sequence, 0 when there is none

	position string // of the write-ahead log afterwards, asked where a replica may serve
}

// readTick makes a tick of the server's answers. high is the highest id that any earlier tick or stored position counted
// as visible: marks never fall, or a row in between would be delivered twice.
func readTick(low, text, last string, e epoch, high, stray int64) (tick, error) {
	s, err := parseSnapshot(text)
	if err != nil {
		return tick{}, err
	}
	s.epoch, s.first = e.number, e.first
	if s.low, err = strconv.ParseInt(low, 10, 64); err != nil {
		return tick{}, fmt.Errorf("lower mark: %w", err)
	}
	upper, err := strconv.ParseInt(last, 10, 64)
	if err != nil {
		return tick{}, fmt.Errorf("upper mark: %w", err)
	}
	s.high = max(upper, high, stray)
	return tick{snapshot: s, stray: stray}, nil
}
