//go:build unix

package cases_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-61: the tables were brought to another server without the sequence. Publishing fails and says what to do; the relay refuses to
// start and says what to do; afterwards all comes, what was written below the position too.
func TestFC61_SequenceThatStayedBehindIsLoud(t *testing.T) {
	t.Parallel()
	from, source, target := twoServers(t)
	s := newSink()
	source.ageBy(1000)
	r := source.read(t, "before the move", s, ackAll, fourShards)
	source.put(t, "k", numbered("before", 20)...)
	s.await(t, 10*time.Second, numbered("before", 20)...)
	last := source.ID("before 19")
	source.awaitStored(t, last)
	r.close(t)
	source.Exec("DELETE FROM outbox WHERE id > 10 AND id < 20") // or no row could be written below the position
	copyTables(t, from, source, target)
	target.Exec("SELECT setval('outbox_id_seq', 9)")
	target.committed = source.oracle()
	target.KeepHistory()

	err := target.putTx(t.Context(), "k", "fails")
	if err == nil || !strings.Contains(err.Error(), `SELECT setval(E'"public"."outbox_id_seq"', (SELECT max(id) FROM "public"."outbox"))`) {
		t.Fatalf("publishing on a sequence that stayed behind: %v", err)
	}
	// 10 was taken. 11 to 19 are free, and below every stored position.
	target.put(t, "k", numbered("below", 5)...)
	if id := target.ID("below 0"); id >= last {
		t.Fatalf("the trap is none: the row's id is %d", id)
	}
	target.mustRefuse(t, fmt.Sprintf(`SELECT setval(E'"public"."outbox_id_seq"', %d)`, last))
	target.mustRefuse(t, fmt.Sprintf(`UPDATE "public"."outbox" SET id = DEFAULT WHERE id <= %d AND xid::xid = xmin`, last))
	if n := target.Text("SELECT count(*) FROM outbox_epochs"); n != "1" {
		t.Errorf("%s epochs", n)
	}
	target.Exec(fmt.Sprintf(`BEGIN; LOCK TABLE "public"."outbox"; SELECT setval(E'"public"."outbox_id_seq"', %d);
		UPDATE "public"."outbox" SET id = DEFAULT WHERE id <= %d AND xid::xid = xmin; COMMIT`, last, last))
	r = target.read(t, "after the move", s, ackAll, fourShards)
	target.put(t, "k", numbered("after", 20)...)
	target.probe(t, s, 10*time.Second)
	target.judge(t, s)
	s.mustHaveComeOnce(t)
	s.mustKeepOrder(t)
	r.close(t)
}

// FC-61: the positions came along and the table that tells their server did not. This server would wait for transaction ids that
// it reaches in weeks.
func TestFC61_PositionFromTheFutureIsLoud(t *testing.T) {
	t.Parallel()
	from, source, target := twoServers(t)
	s := newSink()
	source.ageBy(3000)
	r := source.read(t, "before the move", s, ackAll, fourShards)
	source.put(t, "k", numbered("before", 20)...)
	s.await(t, 10*time.Second, numbered("before", 20)...)
	source.awaitStored(t, source.ID("before 19"))
	r.close(t)
	source.put(t, "k", numbered("undelivered", 20)...)
	copyTables(t, from, source, target)
	target.Exec("UPDATE outbox_epochs SET system_identifier = (SELECT system_identifier FROM pg_control_system())") // as Migrate does
	target.committed = source.oracle()
	target.KeepHistory()

	r = target.reader(t, fourShards)
	r.subscribe(t, "after the move", s, ackAll)
	target.put(t, "k", numbered("after", 20)...)
	const repair = `UPDATE "public"."outbox_epochs" SET system_identifier = 0 WHERE epoch = 1`
	outboxtest.Eventually(t, 10*time.Second, "the reader is not healthy and says why", func() (bool, string) {
		err := r.sub.Healthy(t.Context())
		return err != nil && strings.Contains(err.Error(), "this server's future") && strings.Contains(err.Error(), repair), fmt.Sprint(err)
	})
	if n := len(s.All()); n != 20 {
		t.Errorf("%d were delivered", n)
	}
	target.Exec(repair)
	target.EndLockSessions()
	target.probe(t, s, 10*time.Second)
	target.judge(t, s)
	s.mustHaveComeOnce(t)
	s.mustKeepOrder(t)
	outboxtest.Eventually(t, 5*time.Second, "the reader is healthy", func() (bool, string) {
		err := r.sub.Healthy(t.Context())
		return err == nil, fmt.Sprint(err)
	})
	r.close(t)
}

// awaitStored waits until a row is stored as done, and nothing is pending. A shard that had nothing to do is stored once a minute.
func (ob *outbox) awaitStored(t *testing.T, id int64) {
	t.Helper()
	outboxtest.Eventually(t, 10*time.Second, "the position is past what was delivered", func() (bool, string) {
		past := false
		cursors := ob.Cursors()
		for _, c := range cursors {
			if len(c.Pending) > 0 {
				return false, fmt.Sprintf("%+v", c)
			}
			past = past || c.Past(id)
		}
		return past, fmt.Sprintf("%+v", cursors)
	})
}
