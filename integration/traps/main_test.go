// Package traps holds, on a real server, the traps that a reader of an outbox falls into: each test sets one up, shows that it
// is real where that is cheap, and shows that no row is lost, doubled, inverted or stalled in it.
package traps

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return migrated(t, pgserver.Database(t))
}

func migrated(t *testing.T, dsn string) *outbox {
	t.Helper()
	return &outbox{outboxtest.In(t, dsn)}
}

// put inserts one keyed row for each uuid, in one statement.
func (db *outbox) put(on outboxtest.Execer, uuids ...string) {
	db.Helper()
	db.ExecOn(on, "INSERT INTO outbox (topic, key, uuid) SELECT 't', 'k', uuid FROM unnest($1::text[]) AS u (uuid)", uuids)
}

// number returns the only value of a query.
func (db *outbox) number(sql string, args ...any) int64 {
	db.Helper()
	return outboxtest.Ask[int64](db.Outbox, sql, args...)
}

// saved waits until the stored positions cover every row, so that nothing would come again.
func (db *outbox) saved() {
	db.Helper()
	db.Eventually("every row is saved as acked", `
		SELECT NOT EXISTS (
			SELECT FROM outbox AS o
			CROSS JOIN outbox_cursors AS c
			JOIN outbox_consumers AS k ON k.id = c.consumer_id
			WHERE c.shard = o.slot % k.shards AND (c.pending <> '{}' OR NOT (
				o.id <= c.after_high AND pg_visible_in_snapshot(o.xid, c.after_snapshot)
				OR coalesce(o.id <= least(c.upto_high, c.last_id) AND pg_visible_in_snapshot(o.xid, c.upto_snapshot), false))))`)
}

var poolNumber atomic.Int64

// newPool is a pool whose sessions can be told from all others by its name.
func (db *outbox) newPool(mod ...func(*pgxpool.Config)) (pool *pgxpool.Pool, name string) {
	db.Helper()
	name = fmt.Sprintf("reader %d", poolNumber.Add(1))
	return pgserver.Pool(db.TB, db.DSN, append([]func(*pgxpool.Config){outboxtest.Setting("application_name", name)}, mod...)...), name
}

// inOrder is a consumer whose deliveries come one at a time, so that a test can compare the whole sequence.
func inOrder() pgoutbox.SubscriberConfig {
	return pgoutbox.SubscriberConfig{
		ConsumerGroup: "test", Shards: 1, Ordering: pgoutbox.OrderByShard,
		PollInterval: 5 * time.Millisecond, RetryInterval: 50 * time.Millisecond, SaveInterval: 10 * time.Millisecond,
	}
}

// receiver is a Subscriber and what it delivered.
type receiver struct {
	*pgoutbox.Subscriber
	outboxtest.Sink

	db       *outbox
	log      *outboxtest.Log
	finished chan struct{}
	ack      func(outboxtest.Delivery) bool
	ends     int
}

// receive subscribes to every topic and acks what comes, or only what ack says.
func (db *outbox) receive(pool *pgxpool.Pool, cfg pgoutbox.SubscriberConfig, ack func(outboxtest.Delivery) bool) *receiver {
	db.Helper()
	r := &receiver{db: db, log: outboxtest.NewLog(db), finished: make(chan struct{}), ack: ack}
	var err error
	if r.Subscriber, err = pgoutbox.NewSubscriber(pool, cfg, r.log); err != nil {
		db.Fatal(err)
	}
	db.Cleanup(r.close)
	messages, err := r.Subscribe(context.WithoutCancel(db.Context()), pgoutbox.AllTopics)
	if err != nil {
		db.Fatal(err)
	}
	go func() {
		defer close(r.finished)
		for msg := range messages {
			r.take(msg)
		}
	}()
	return r
}

func (r *receiver) take(msg *message.Message) {
	d := outboxtest.Received("", msg)
	r.Add(d)
	if r.ack == nil || r.ack(d) {
		msg.Ack()
	}
}

func (r *receiver) close() {
	if err := r.Close(); err != nil {
		r.db.Error(err)
	}
	select {
	case <-r.finished:
	case <-time.After(outboxtest.Patience):
		r.db.Error("the channel is still open after Close")
	}
}

// until waits for a delivery of each row.
func (r *receiver) until(uuids ...string) {
	r.db.Helper()
	r.Until(r.db, outboxtest.Patience, uuids...)
}

const endMark = "end "

// settle waits for two more batches, each with a row of its own: what would come twice has come by then.
func (r *receiver) settle() {
	r.db.Helper()
	for range 2 {
		r.ends++
		uuid := fmt.Sprintf("%s%d", endMark, r.ends)
		r.db.put(r.db.Pool, uuid)
		r.until(uuid)
	}
}

// exactly fails unless the rows, and no others, came once each and in this order.
func (r *receiver) exactly(want ...string) {
	r.db.Helper()
	r.until(want...)
	r.settle()
	var got []string
	for _, d := range r.All() {
		if !strings.HasPrefix(d.UUID, endMark) {
			got = append(got, d.UUID)
		}
	}
	if !slices.Equal(got, want) {
		r.db.Errorf("delivered %d rows %.300q, want %d rows %.300q; the log says\n%s", len(got), got, len(want), want, r.log)
	}
}

// numbered returns n names: "a 1", "a 2", ….
func numbered(name string, n int) []string {
	all := make([]string, n)
	for i := range all {
		all[i] = fmt.Sprintf("%s %d", name, i+1)
	}
	return all
}
