package torture

import (
	"sync"
	"time"
)

// Record is one line of a sink's log.
type Record struct {
	At, Acked   time.Duration // from the start of the run; Acked 0 = not acknowledged
	Incarnation int           // which life of the reader delivered it
	Row         int64
	Message
	Refused bool   // its handler failed on purpose
	Damage  string // how the row differs from what was written; "" = it does not
}

// sink logs what a reader delivers. It is safe for concurrent use, and the order of its log is the order of the calls.
type sink struct {
	history *history

	mu   sync.Mutex
	log  []Record
	keys map[string]string // one string a key, not one a record
	done []uint64          // a bit for each message id that was acknowledged
}

// deliver logs d and returns its place in the log.
func (s *sink) deliver(incarnation int, d Delivery) int {
	m, err := read(d)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys == nil {
		s.keys = make(map[string]string)
	}
	if _, ok := s.keys[m.Key]; !ok {
		s.keys[m.Key] = m.Key
	}
	m.Key = s.keys[m.Key]
	r := Record{At: s.history.now(), Incarnation: incarnation, Row: d.Row, Message: m}
	if err != nil {
		r.Damage = err.Error()
	}
	s.log = append(s.log, r)
	return len(s.log) - 1
}

func (s *sink) ack(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log[n].Acked = s.history.now()
	s.mark(s.log[n].ID)
}

func (s *sink) refuse(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.log[n].Refused = true
}

// missing counts the entries that have not been acknowledged.
func (s *sink) missing(oracle []Entry) (count int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range oracle {
		if !s.has(e.ID) {
			count++
		}
	}
	return count
}

func (s *sink) mark(id int64) {
	for int64(len(s.done)) <= id/64 {
		s.done = append(s.done, 0)
	}
	s.done[id/64] |= 1 << (id % 64)
}

func (s *sink) has(id int64) bool {
	return id/64 < int64(len(s.done)) && s.done[id/64]&(1<<(id%64)) != 0
}
