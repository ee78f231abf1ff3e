//go:build unix

package faults

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) {
	if code, isChild := Child(); isChild {
		os.Exit(code)
	}
	os.Exit(pgserver.Run(m))
}

// slack is what a busy machine may add to a promised time.
const slack = 2 * time.Second

// outbox keeps every state that a cursor of it ever had.
type outbox struct{ *outboxtest.Outbox }

func newOutbox(t *testing.T) *outbox {
	t.Helper()
	db := &outbox{outboxtest.New(t, func(c *pgxpool.Config) { c.MaxConns = 20 })}
	db.KeepHistory()
	return db
}

const (
	// sessions counts our lock sessions in this database.
	sessions = "SELECT count(*)::int FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'"
	// locks counts the advisory locks that are held in this database.
	locks = "SELECT count(*)::int FROM pg_locks WHERE " + outboxtest.IsAdvisoryLock
	// leaders lists who holds them.
	leaders = "SELECT coalesce(array_agg(DISTINCT pid), '{}') FROM pg_locks WHERE " + outboxtest.IsAdvisoryLock

	terms = "SELECT coalesce(sum(term), 0)::bigint FROM outbox_cursors"
)

// awaitStandby waits until a second session has tried for the locks of the first.
func (db *outbox) awaitStandby() {
	db.Helper()
	db.Eventually("another session tries for the locks", `
		SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'
			AND query LIKE '%pg_try_advisory_lock%' AND pid NOT IN (SELECT pid FROM pg_locks WHERE `+outboxtest.IsAdvisoryLock+`))
			AND EXISTS (SELECT FROM pg_locks WHERE `+outboxtest.IsAdvisoryLock+")")
}

// leader is the one session that holds locks.
func (db *outbox) leader() int32 {
	db.Helper()
	pids := outboxtest.Ask[[]int32](db.Outbox, leaders)
	if len(pids) != 1 {
		db.Fatalf("sessions with advisory locks: %v, want one", pids)
	}
	return pids[0]
}

// put writes n rows with as many keys.
func (db *outbox) put(n int) {
	db.Helper()
	db.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'key ' || i, 'row ' || i FROM generate_series(1, $1::int) AS i", n)
}

// awaitSaved waits until the stored positions are past every row, with nothing pending.
func (db *outbox) awaitSaved(shards int) {
	db.Helper()
	db.Eventually("all is saved", `
		SELECT NOT EXISTS (SELECT
			FROM outbox AS o
			JOIN outbox_cursors AS c ON c.shard = (hashtextextended(o.key COLLATE "C", 0) & 255) % $1
			WHERE c.pending <> '{}' OR NOT (c.after_high >= o.id OR coalesce(c.upto_high, 0) >= o.id AND c.last_id >= o.id))`, shards)
}

// cursorsNeverWentBack fails when a stored position, or a term, was ever followed by an earlier one.
func (db *outbox) cursorsNeverWentBack() {
	db.Helper()
	if db.MustNotGoBack() == 0 {
		db.Error("no state of a cursor was noted")
	}
}

// start starts a child and kills it when the test ends.
func (db *outbox) start(role Role, into *Journal) *Process {
	db.Helper()
	role.DSN = db.DSN
	p, err := Start(role, into)
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() {
		p.Kill()
		if said := p.Said(); db.Failed() {
			db.Logf("child %d said, at last:\n%s", p.PID, said[max(0, len(said)-3000):])
		}
	})
	return p
}

// wait returns the first delivery that fits.
func (db *outbox) wait(what string, j *Journal, fits func(Delivery) bool) Delivery {
	db.Helper()
	ctx, cancel := context.WithTimeout(db.Context(), outboxtest.Patience)
	defer cancel()
	d, err := j.Wait(ctx, fits)
	if err != nil {
		db.Fatalf("never delivered: %s, after %d deliveries", what, len(j.All()))
	}
	return d
}

// waitForAll waits until every committed row was delivered, and returns all deliveries of each.
func (db *outbox) waitForAll(j *Journal) map[int64][]Delivery {
	db.Helper()
	missing := map[int64]bool{}
	rows, _ := db.Pool.Query(db.Context(), "SELECT id FROM outbox")
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	if err != nil {
		db.Fatal(err)
	}
	for _, id := range ids {
		missing[id] = true
	}
	db.wait(fmt.Sprintf("all of %d rows", len(ids)), j, func(d Delivery) bool {
		delete(missing, d.ID)
		return len(missing) == 0
	})
	out := map[int64][]Delivery{}
	for _, d := range j.All() {
		out[d.ID] = append(out[d.ID], d)
	}
	return out
}

// reader is a Subscriber in this process, behind a proxy or not. It acks everything but what it was told to hold.
type reader struct {
	db   *outbox
	log  *outboxtest.Log
	sub  *pgoutbox.Subscriber
	held chan *message.Message // rows of the key "hold"
	slow chan *message.Message // rows of keys that begin with "slow"
	got  chan *message.Message // acked
}

// dsnOf is the database's address behind a proxy.
func (db *outbox) dsnOf(p *Proxy) string {
	cfg, err := pgx.ParseConfig(db.DSN)
	if err != nil {
		db.Fatal("the server's connection string cannot be read")
	}
	return fmt.Sprintf("host=127.0.0.1 port=%d user='%s' password='%s' dbname='%s' sslmode=disable", p.Port(), cfg.User, cfg.Password, cfg.Database)
}

func (db *outbox) proxy() *Proxy {
	db.Helper()
	p, err := NewProxy(db.DSN)
	if err != nil {
		db.Fatal(err)
	}
	db.Cleanup(p.Close)
	return p
}

func (db *outbox) subscriber(cfg pgoutbox.SubscriberConfig) *reader {
	db.Helper()
	if cfg.ConsumerGroup == "" {
		cfg.ConsumerGroup = group
	}
	if cfg.CloseTimeout == 0 {
		cfg.CloseTimeout = 100 * time.Millisecond
	}
	r := &reader{db: db, log: outboxtest.NewLog(db), held: make(chan *message.Message, 100), slow: make(chan *message.Message, 100), got: make(chan *message.Message, 100_000)}
	var err error
	if r.sub, err = pgoutbox.NewSubscriber(db.Pool, cfg, r.log); err != nil {
		db.Fatal(err)
	}
	db.Cleanup(func() {
		if err := r.sub.Close(); err != nil {
			db.Error(err)
		}
	})
	return r
}

// read subscribes; what comes is handled until the channel closes.
func (r *reader) read(ctx context.Context) (ended <-chan struct{}, err error) {
	messages, err := r.sub.Subscribe(ctx, pgoutbox.AllTopics)
	if err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() { // Close, at the end of the test, ends it
		defer close(done)
		for msg := range messages {
			switch row, _ := pgoutbox.RowFromContext(msg.Context()); {
			case row.Key == "hold":
				r.held <- msg
			case strings.HasPrefix(row.Key, "slow"):
				r.slow <- msg
			default:
				r.got <- msg
				msg.Ack()
			}
		}
	}()
	return done, nil
}

func (r *reader) mustRead() (ended <-chan struct{}) {
	r.db.Helper()
	ended, err := r.read(context.WithoutCancel(r.db.Context()))
	if err != nil {
		r.db.Fatal(err)
	}
	return ended
}

func median(times []time.Duration) time.Duration {
	return slices.Sorted(slices.Values(times))[len(times)/2]
}

// ms rounds for people.
func ms(d time.Duration) time.Duration { return d.Round(time.Millisecond) }
