package cases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

const topic = "orders"

// outbox is an outbox in a database of its own, and what its writers committed: the oracle.
type outbox struct {
	dsn    string
	pool   *pgxpool.Pool // of the writers
	pub    *pgoutbox.Publisher
	probes atomic.Int64

	mu        sync.Mutex
	committed []sent
}

// sent is one message as it was published.
type sent struct {
	uuid, key string
	payload   []byte
	metadata  message.Metadata
	at        time.Time // before its COMMIT was sent
}

func newOutbox(t testing.TB) *outbox {
	t.Helper()
	return newOutboxIn(t, pgserver.Database(t))
}

// newOutboxIn sets an outbox up in an empty database, with a log of its cursors.
func newOutboxIn(t testing.TB, dsn string) *outbox {
	t.Helper()
	ob := &outbox{dsn: dsn, pool: pgserver.Pool(t, dsn, func(c *pgxpool.Config) { c.MaxConns = 20 })}
	must(t, pgoutbox.Migrate(t.Context(), ob.pool, pgoutbox.SchemaConfig{}))
	ob.exec(t, logCursors)
	var err error
	ob.pub, err = pgoutbox.NewPublisher(ob.pool, pgoutbox.PublisherConfig{}, nil)
	must(t, err)
	return ob
}

func (ob *outbox) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := ob.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// ask returns the one value that a query gives.
func ask[T any](t testing.TB, ob *outbox, sql string, args ...any) T {
	t.Helper()
	rows, _ := ob.pool.Query(t.Context(), sql, args...) // CollectExactlyOneRow tells the error
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// writing is a business transaction that publishes.
type writing struct {
	pgx.Tx

	ob    *outbox
	wrote []sent
}

func (ob *outbox) begin(t testing.TB) *writing {
	t.Helper()
	w, err := ob.beginTx(t.Context())
	must(t, err)
	t.Cleanup(func() { _ = w.Rollback(context.WithoutCancel(t.Context())) })
	return w
}

func (ob *outbox) beginTx(ctx context.Context) (*writing, error) {
	tx, err := ob.pool.Begin(ctx)
	return &writing{Tx: tx, ob: ob}, err
}

// publish writes one message for each UUID. The key is "" for none.
func (w *writing) publish(key string, uuids ...string) error {
	var messages []*message.Message
	for _, uuid := range uuids {
		msg := message.NewMessage(uuid, []byte("payload of "+uuid))
		msg.Metadata.Set("origin", uuid)
		if key != "" {
			msg.Metadata.Set(pgoutbox.OrderingKey, key)
		}
		messages = append(messages, msg)
		w.wrote = append(w.wrote, sent{uuid: uuid, key: key, payload: msg.Payload, metadata: maps.Clone(msg.Metadata)})
	}
	return w.ob.pub.WithTx(w.Tx).Publish(topic, messages...)
}

// Commit makes what was written part of the oracle.
func (w *writing) Commit(ctx context.Context) error {
	at := time.Now()
	if err := w.Tx.Commit(ctx); err != nil {
		return err
	}
	w.ob.mu.Lock()
	defer w.ob.mu.Unlock()
	for _, s := range w.wrote {
		s.at = at
		w.ob.committed = append(w.ob.committed, s)
	}
	return nil
}

// put publishes in a transaction of its own.
func (ob *outbox) put(t testing.TB, key string, uuids ...string) {
	t.Helper()
	must(t, ob.putTx(t.Context(), key, uuids...))
}

func (ob *outbox) putTx(ctx context.Context, key string, uuids ...string) error {
	w, err := ob.beginTx(ctx)
	if err != nil {
		return err
	}
	if err := w.publish(key, uuids...); err != nil {
		return errors.Join(err, w.Rollback(ctx))
	}
	return w.Commit(ctx)
}

// probe publishes a fresh message and demands that it arrives: LIVE.
func (ob *outbox) probe(t testing.TB, s *sink, within time.Duration) delivery {
	t.Helper()
	uuid := fmt.Sprintf("probe %d", ob.probes.Add(1))
	ob.put(t, "", uuid)
	return s.await(t, within, uuid)
}

func (ob *outbox) oracle() []sent {
	ob.mu.Lock()
	defer ob.mu.Unlock()
	return append([]sent(nil), ob.committed...)
}

// id is the row of a message.
func (ob *outbox) id(t testing.TB, uuid string) int64 {
	t.Helper()
	return ask[int64](t, ob, "SELECT id FROM outbox WHERE uuid = $1", uuid)
}

// keyIn returns the n-th key that falls into a shard.
func (ob *outbox) keyIn(t testing.TB, shard, shards, n int) string {
	t.Helper()
	return ask[string](t, ob, `SELECT key FROM (SELECT 'key-' || i AS key FROM generate_series(1, 10000) AS i) AS keys
		WHERE (hashtextextended(key COLLATE "C", 0) & 255) % $1 = $2 ORDER BY length(key), key OFFSET $3 LIMIT 1`, shards, shard, n)
}

// judge waits until all is delivered that committed (NO-LOSS), and demands that nothing else was (NO-GHOST), that everything
// came as it was published (BYTES) and that no stored position ever went back (CURSOR-MONO).
func (ob *outbox) judge(t testing.TB, s *sink) {
	t.Helper()
	published := map[string]sent{}
	var uuids []string
	for _, one := range ob.oracle() {
		published[one.uuid] = one
		uuids = append(uuids, one.uuid)
	}
	s.await(t, 10*time.Second, uuids...)
	for _, d := range s.all() {
		want, ok := published[d.UUID]
		if !ok {
			t.Errorf("NO-GHOST: %q was delivered and never committed", d.UUID)
			continue
		}
		if !bytes.Equal(d.Payload, want.payload) || !maps.Equal(d.Metadata, want.metadata) || d.Row.Key != want.key || d.Row.Topic != topic {
			t.Errorf("BYTES: %q came with payload %q, metadata %v, topic %q and key %q; published were %q, %v, %q and %q", d.UUID,
				d.Payload, d.Metadata, d.Row.Topic, d.Row.Key, want.payload, want.metadata, topic, want.key)
		}
	}
	ob.mustBeMonotonous(t)
}

// mustBeClean demands that no session and no lock of ours is left: CLEAN. The server may need a moment to notice that a
// socket was closed.
func (ob *outbox) mustBeClean(t testing.TB) {
	t.Helper()
	eventually(t, 5*time.Second, "CLEAN: sessions and locks of ours are gone", func() (bool, string) {
		sessions := ask[int](t, ob, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'`)
		locks := ob.locks(t)
		return sessions+len(locks) == 0, fmt.Sprintf("%d sessions, locks %v", sessions, locks)
	})
}

// locks lists the advisory locks held in this database, once for each session.
func (ob *outbox) locks(t testing.TB) []string {
	t.Helper()
	rows, _ := ob.pool.Query(t.Context(), `SELECT classid || '/' || objid FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		ORDER BY 1`)
	locks, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	return locks
}

// awaitLocks waits until so many locks are held.
func (ob *outbox) awaitLocks(t testing.TB, n int) {
	t.Helper()
	eventually(t, 10*time.Second, fmt.Sprintf("%d shards are led", n), func() (bool, string) {
		locks := ob.locks(t)
		return len(locks) == n, fmt.Sprint(locks)
	})
}

// lockSessions returns the process ids of the sessions that hold advisory locks.
func (ob *outbox) lockSessions(t testing.TB) []int {
	t.Helper()
	rows, _ := ob.pool.Query(t.Context(), `SELECT DISTINCT pid FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	must(t, err)
	return pids
}
