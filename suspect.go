package pgoutbox

import (
	"fmt"
	"strconv"
)

// suspect is the row that was out by itself when a position was stored, and how many leaders will have ended with it if this one
// does. The zero value is none.
type suspect struct {
	id     int64
	deaths int
}

func (s suspect) args() []any {
	if s.id == 0 {
		return []any{nil, 0}
	}
	return []any{s.id, s.deaths}
}

func parseSuspect(columns [][]byte) (suspect, error) {
	var out suspect
	if columns[0] == nil {
		return out, nil
	}
	var err error
	if out.id, err = strconv.ParseInt(string(columns[0]), 10, 64); err != nil {
		return out, fmt.Errorf("id: %w", err)
	}
	if out.deaths, err = strconv.Atoi(string(columns[1])); err != nil {
		return out, fmt.Errorf("deaths: %w", err)
	}
	return out, nil
}
