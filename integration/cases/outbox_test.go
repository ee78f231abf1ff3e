package cases_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// outbox is an outbox in a database of its own, with a log of its cursors, and what its writers committed: the oracle.
type outbox struct {
	*outboxtest.Outbox

	probes atomic.Int64

	mu        sync.Mutex
	committed []sent
}

func newOutbox(t testing.TB) *outbox {
	t.Helper()
	return newOutboxIn(t, pgserver.Database(t))
}

// newOutboxIn sets an outbox up in an empty database.
func newOutboxIn(t testing.TB, dsn string) *outbox {
	t.Helper()
	ob := &outbox{Outbox: outboxtest.In(t, dsn, func(c *pgxpool.Config) { c.MaxConns = 20 })}
	ob.KeepHistory()
	return ob
}

// awaitPending waits until the one shard's stored position is past a row and lists exactly these rows as pending.
func (ob *outbox) awaitPending(t testing.TB, past int64, pending ...int64) {
	t.Helper()
	outboxtest.Eventually(t, 10*time.Second, fmt.Sprintf("the stored position is past row %d and keeps %v", past, pending), func() (bool, string) {
		c := ob.Cursors()[0]
		return c.Past(past) && slices.Equal(c.Pending, pending), fmt.Sprintf("%+v", c)
	})
}

// sent is one message as it was published.
type sent struct {
	uuid, key string
	payload   []byte
	metadata  message.Metadata
	at        time.Time // before its COMMIT was sent
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
	tx, err := ob.Pool.Begin(ctx)
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
	return w.ob.Pub.WithTx(w.Tx).Publish(outboxtest.Topic, messages...)
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

// judge demands what judgeDeliveries does, and that no stored position ever went back (CURSOR-MONO).
func (ob *outbox) judge(t testing.TB, s *sink) {
	t.Helper()
	ob.judgeDeliveries(t, s)
	ob.MustNotGoBack()
}

// judgeDeliveries waits until all is delivered that committed (NO-LOSS), and demands that nothing else was (NO-GHOST) and that
// everything came as it was published (BYTES).
func (ob *outbox) judgeDeliveries(t testing.TB, s *sink) {
	t.Helper()
	published := map[string]sent{}
	var uuids []string
	for _, one := range ob.oracle() {
		published[one.uuid] = one
		uuids = append(uuids, one.uuid)
	}
	s.await(t, 10*time.Second, uuids...)
	for _, d := range s.All() {
		want, ok := published[d.UUID]
		if !ok {
			t.Errorf("NO-GHOST: %q was delivered and never committed", d.UUID)
			continue
		}
		if !bytes.Equal(d.Payload, want.payload) || !maps.Equal(d.Metadata, want.metadata) || d.Row.Key != want.key || d.Row.Topic != outboxtest.Topic {
			t.Errorf("BYTES: %q came with payload %q, metadata %v, topic %q and key %q; published were %q, %v, %q and %q", d.UUID,
				d.Payload, d.Metadata, d.Row.Topic, d.Row.Key, want.payload, want.metadata, outboxtest.Topic, want.key)
		}
	}
}
