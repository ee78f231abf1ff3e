//go:build unix

package faults

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// drained reads what was acked until every committed row came, and returns how often each did.
func (r *reader) drained(t *testing.T, times map[string]int) {
	t.Helper()
	missing := map[string]bool{}
	for _, uuid := range outboxtest.Ask[[]string](r.db.Outbox, "SELECT array_agg(uuid) FROM outbox") {
		missing[uuid] = times[uuid] == 0
		if !missing[uuid] {
			delete(missing, uuid)
		}
	}
	for len(missing) > 0 {
		msg := outboxtest.Next(t, fmt.Sprintf("one of %d rows", len(missing)), r.got)
		times[msg.UUID]++
		delete(missing, msg.UUID)
	}
}

// FC-71: the server has stored a position, and its answer is lost with the connection. The reader goes on from what is stored, and the
// position never goes back. It may be the answer to the first statement of a term, too. (The other half, the lost answer to a COMMIT that publishes: writeside.)
func TestFC71_LostAnswerToASaveLosesNothing(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	p := db.proxy()
	r := db.subscriber(pgoutbox.SubscriberConfig{
		Shards: 2, LockConn: db.dsnOf(p), SaveInterval: 20 * time.Millisecond, PollInterval: 10 * time.Millisecond, RetryInterval: 20 * time.Millisecond,
	})
	ended := r.mustRead()
	times := map[string]int{}
	var cuts, rows int
	lost := make(chan struct{}, 1)
	loseOne := func(m Message) ([]byte, bool) {
		if m[0] != 'C' || !bytes.HasPrefix(m[5:], []byte("UPDATE ")) {
			return m, false
		}
		select {
		case lost <- struct{}{}:
			go p.Cut() // the proxy waits for this goroutine
			return nil, true
		default: // the next session's
			return m, false
		}
	}
	for round := range outboxtest.Rounds(20) {
		db.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'key ' || i % 7, format('%s/%s', $1::int, i) FROM generate_series(1, 50) AS i", round)
		rows += 50
		p.Set(ToClient, loseOne)
		r.drained(t, times)
		outboxtest.Next(t, "a save whose answer is lost", lost)
		cuts++
		p.Pass(ToClient)
	}
	db.Exec("INSERT INTO outbox (topic, uuid) VALUES ('orders', 'last')")
	r.drained(t, times)
	db.awaitSaved(2)
	repeats := 0
	for _, n := range times {
		repeats += n - 1
	}
	t.Logf("%d answers lost, %d rows, %d repeats", cuts, rows, repeats)
	if repeats > rows/2 {
		t.Errorf("%d of %d rows were repeated", repeats, rows)
	}
	db.cursorsNeverWentBack()
	db.Must(r.sub.Close())
	<-ended
}
