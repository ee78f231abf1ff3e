//go:build unix

package cases_test

import (
	"testing"
	"time"
)

// FC-76: a transaction that published was prepared, and its coordinator is gone. Nobody waits for it, over a restart of the server
// and of the reader; when it ends, its message comes, or does not.
func TestFC76_PreparedTransactionDelaysNobody(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil)
	ob, s := newOutboxIn(t, server.Database(t)), newSink()
	prepared := func(uuid string) writing {
		w := ob.begin(t)
		must(t, w.publish("", uuid))
		ob.ExecOn(w, "PREPARE TRANSACTION '"+uuid+"'")
		ob.Must(w.Tx.Commit(t.Context())) // ends nothing any more
		return *w
	}
	first, second := prepared("committed at last"), prepared("rolled back at last")
	r := ob.read(t, "before", s, ackAll, fourShards)
	ob.probe(t, s, 5*time.Second)
	r.close(t)
	must(t, server.Restart(t.Context(), "immediate"))
	ob.Pool.Reset()
	r = ob.read(t, "after", s, ackAll, fourShards)
	ob.probe(t, s, 5*time.Second)
	if n := len(s.of(first.wrote[0].uuid)) + len(s.of(second.wrote[0].uuid)); n > 0 {
		t.Fatalf("%d messages of prepared transactions were delivered", n)
	}
	ob.Exec("COMMIT PREPARED 'committed at last'")
	ob.Exec("ROLLBACK PREPARED 'rolled back at last'")
	ob.mu.Lock()
	ob.committed = append(ob.committed, first.wrote...)
	ob.mu.Unlock()
	ob.probe(t, s, 5*time.Second)
	ob.judge(t, s) // NO-GHOST: the other one
	r.close(t)
}
