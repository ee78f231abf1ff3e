package outboxtest

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// Delivery is one message in a handler's hands, copied as it came.
type Delivery struct {
	pgoutbox.Row

	At        time.Time
	Reader    string // who had it
	UUID      string
	MessageID string // of the row
	Payload   []byte
	Metadata  message.Metadata

	Message *message.Message `json:"-"` // the very one; nil when another process has it
}

// Received is a delivery to a reader, now.
func Received(reader string, msg *message.Message) Delivery {
	row, _ := pgoutbox.RowFromContext(msg.Context())
	return Delivery{
		Row: row, At: time.Now(), Reader: reader, UUID: msg.UUID, MessageID: pgoutbox.MessageID(msg.Context()),
		Payload: bytes.Clone(msg.Payload), Metadata: maps.Clone(msg.Metadata), Message: msg,
	}
}

// Sink is the log of all deliveries, which knows them by their messages' UUIDs. Its zero value is empty and ready; it is safe
// for concurrent use.
type Sink struct{ Record[Delivery] }

// Times is how often each message came.
func (s *Sink) Times() map[string]int {
	times := map[string]int{}
	for _, d := range s.All() {
		times[d.UUID]++
	}
	return times
}

// Until waits until each of the messages has come.
func (s *Sink) Until(t testing.TB, within time.Duration, uuids ...string) {
	t.Helper()
	missing, seen := map[string]bool{}, 0
	for _, uuid := range uuids {
		missing[uuid] = true
	}
	s.Await(t, within, func(all []Delivery) (bool, string) {
		for _, d := range all[seen:] {
			delete(missing, d.UUID)
		}
		seen = len(all)
		return len(missing) == 0, fmt.Sprintf("%d of %d messages have not come: %s", len(missing), len(uuids), some(missing))
	})
}

// UntilTimes waits until a message has come so often, and returns the last of these deliveries.
func (s *Sink) UntilTimes(t testing.TB, within time.Duration, uuid string, times int) (last Delivery) {
	t.Helper()
	s.Await(t, within, func(all []Delivery) (bool, string) {
		n := 0
		for _, d := range all {
			if d.UUID == uuid && n < times {
				n, last = n+1, d
			}
		}
		return n >= times, fmt.Sprintf("%q came %d times, not %d", uuid, n, times)
	})
	return last
}

// some names a few of many.
func some(set map[string]bool) string {
	names := slices.Sorted(maps.Keys(set))
	return fmt.Sprintf("%q", names[:min(len(names), 10)])
}
