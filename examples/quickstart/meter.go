package main

import (
	"context"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// meter notes when messages were committed and when they were forwarded. It feeds the live lines and tells the times of the
// report; what was lost or invented is not its business, see verify.go. It is safe for concurrent use.
type meter struct {
	mu         sync.Mutex
	committed  map[string]time.Time // by UUID: when the writer heard of the commit
	forwarded  map[string]time.Time // by UUID: when it was first forwarded
	waiting    int                  // committed and not forwarded
	rolledBack int
	last       time.Time // when something was first forwarded

	live         time.Time // since when messages are written and forwarded at the same time
	opened, shut time.Time // the transaction that stays open

	term       int64     // the highest before the termination
	terminated time.Time // when the lock session was terminated
	takenOver  time.Time // when the next term forwarded its first message
}

func newMeter() *meter {
	return &meter{committed: map[string]time.Time{}, forwarded: map[string]time.Time{}, last: time.Now()}
}

// totals are the live numbers.
type totals struct{ committed, forwarded, lag int }

func (m *meter) totals() totals {
	m.mu.Lock()
	defer m.mu.Unlock()
	return totals{committed: len(m.committed), forwarded: len(m.committed) - m.waiting, lag: m.waiting}
}

func (m *meter) commit(now time.Time, orders []order) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, o := range orders {
		for _, topic := range topics {
			uuid := o.uuid(topic)
			m.committed[uuid] = now
			if _, ok := m.forwarded[uuid]; !ok {
				m.waiting++
			}
		}
	}
}

func (m *meter) begin(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.live = now
}

func (m *meter) rollBack(messages int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.rolledBack += messages
}

func (m *meter) open(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.opened = now
}

func (m *meter) closed(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.shut = now
}

func (m *meter) terminate(now time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.terminated = now
}

func (m *meter) forward(now time.Time, term int64, uuid string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.terminated.IsZero():
		m.term = max(m.term, term)
	case term > m.term && m.takenOver.IsZero():
		m.takenOver = now
	}
	if _, ok := m.forwarded[uuid]; ok {
		return
	}
	m.forwarded[uuid], m.last = now, now
	if _, ok := m.committed[uuid]; ok {
		m.waiting--
	}
}

func (m *meter) lastForwarded() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// drained waits until everything committed has been forwarded, and returns false when nothing has come for so long or ctx
// ends.
func (m *meter) drained(ctx context.Context, patience time.Duration) bool {
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	began := time.Now()
	for m.totals().lag > 0 {
		since := m.lastForwarded()
		if since.Before(began) {
			since = began
		}
		if time.Since(since) > patience {
			return false
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// takeOver is how long nobody forwarded after the termination; false: nobody took over.
func (m *meter) takeOver() (time.Duration, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.takenOver.Sub(m.terminated), !m.takenOver.IsZero()
}

// longest is the longest time between a commit and the forwarding of its message: of all that were not part of a backlog, and
// of those that committed while the long transaction was open.
func (m *meter) longest() (all, beside time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uuid, committed := range m.committed {
		forwarded, ok := m.forwarded[uuid]
		if !ok || committed.Before(m.live) {
			continue
		}
		delay := forwarded.Sub(committed) // below zero when the relay was faster than the writer's answer
		all = max(all, delay)
		if committed.After(m.opened) && committed.Before(m.shut) {
			beside = max(beside, delay)
		}
	}
	return all, beside
}

// metered is a Publisher that tells the meter what it has published, and puts a prefix before every topic.
type metered struct {
	message.Publisher

	prefix string
	meter  *meter
}

func (p *metered) Publish(topic string, messages ...*message.Message) error {
	if err := p.Publisher.Publish(p.prefix+topic, messages...); err != nil {
		return err
	}
	now := time.Now()
	for _, msg := range messages {
		row, _ := pgoutbox.RowFromContext(msg.Context())
		p.meter.forward(now, row.Term, msg.UUID)
	}
	return nil
}
