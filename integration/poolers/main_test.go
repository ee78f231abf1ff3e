// Package poolers tests the library behind PgBouncer: the lock session is refused there unless somebody has said that it may pass,
// and everything else works in both pool modes and in each of pgx's exec modes.
package poolers

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// pooled is an outbox with a PgBouncer in front of it. Its DSN and Pool are the server's own.
type pooled struct {
	*outboxtest.Outbox

	bouncer *pgserver.PgBouncer
	dsn     string // by way of the pooler
}

func newPooled(t *testing.T, o pgserver.PgBouncerOptions) *pooled {
	t.Helper()
	p := &pooled{Outbox: outboxtest.New(t), bouncer: pgserver.Shared(t).PgBouncer(t, o)}
	p.dsn = p.bouncer.DSN(p.DSN)
	return p
}

// transactions is PgBouncer as the fault case has it: two server connections for everybody.
func transactions(t *testing.T) *pooled {
	t.Helper()
	return newPooled(t, pgserver.PgBouncerOptions{Mode: "transaction", PoolSize: 2})
}

// sessions leaves each client a server connection for as long as it stays.
func sessions(t *testing.T) *pooled {
	t.Helper()
	return newPooled(t, pgserver.PgBouncerOptions{Mode: "session", PoolSize: 40})
}

// pool is a pool by way of the pooler.
func (p *pooled) pool(mode pgx.QueryExecMode) *pgxpool.Pool {
	p.Helper()
	return pgserver.Pool(p.TB, p.dsn, func(c *pgxpool.Config) {
		c.ConnConfig.DefaultQueryExecMode = mode
		c.MaxConns = 8
	})
}

// untouched fails unless nothing was locked or changed and no session of the library's is left.
func (p *pooled) untouched() {
	p.Helper()
	p.left()
	if n := p.Text("SELECT count(*) FROM outbox_consumers"); n != "0" {
		p.Errorf("%s consumers were created", n)
	}
}

// left fails if an advisory lock, or a lock session, is left. Behind a pooler the server knows nothing of who is connected.
func (p *pooled) left() {
	p.Helper()
	outboxtest.Eventually(p, outboxtest.Patience, "no lock session is left", func() (bool, string) {
		clients, err := p.bouncer.Clients(p.Context())
		p.Must(err)
		return !slices.ContainsFunc(clients, func(name string) bool { return strings.HasPrefix(name, "pgoutbox ") }), fmt.Sprint(clients)
	})
	p.AwaitLocks(0)
}

// mail is one message as it was published, and must be read.
type mail struct {
	metadata message.Metadata
	payload  []byte
}

// hard are n messages that bad encoding would change, by UUID.
func hard(n int) map[string]mail {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	kinds := []mail{
		{message.Metadata{"bytes": "every"}, every},
		{message.Metadata{"ключ 🔑": "значение \"quoted\" \\ back 'single' \u0001\u2028", "": "empty name", "empty value": ""}, []byte("{}")},
		{message.Metadata{}, []byte{}},
		{nil, nil},
		{message.Metadata{pgoutbox.OrderingKey: "key {a,\"b\"} NULL", "json": `{"a": [1, null]}`}, []byte(`\x00ff`)},
		{message.Metadata{"null": "NULL"}, []byte("NULL")},
		{message.Metadata{"long": strings.Repeat("ü", 3000)}, bytes.Repeat(every, 300)},
	}
	all := map[string]mail{}
	for i := range n {
		all[fmt.Sprintf("uuid %d ', \" {} \\ 🔑", i)] = kinds[i%len(kinds)]
	}
	return all
}

func (m mail) message(uuid string) *message.Message {
	msg := message.NewMessage(uuid, m.payload)
	msg.Metadata = maps.Clone(m.metadata)
	return msg
}

// same compares what was read; nil and empty are the same in a table.
func (m mail) same(msg *message.Message) bool {
	return bytes.Equal(m.payload, msg.Payload) && maps.Equal(m.metadata, msg.Metadata)
}

// write publishes all in parallel, every second one in a transaction of its own.
func write(t *testing.T, pool *pgxpool.Pool, all map[string]mail, writers int) {
	t.Helper()
	pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	queue := make(chan string, len(all))
	for uuid := range all {
		queue <- uuid
	}
	close(queue)
	var running sync.WaitGroup
	for range writers {
		running.Go(func() {
			inTx := false
			for uuid := range queue {
				inTx = !inTx
				publish := func(pub *pgoutbox.Publisher) error { return pub.Publish("t", all[uuid].message(uuid)) }
				var err error
				if inTx {
					err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return publish(pub.WithTx(tx)) })
				} else {
					err = publish(pub)
				}
				if err != nil {
					t.Errorf("publish %q: %v", uuid, err)
				}
			}
		})
	}
	running.Wait()
}

// read takes messages until every one of all has come, and compares. A message that comes twice is no fault.
func read(t *testing.T, from <-chan *message.Message, all map[string]mail) {
	t.Helper()
	late := time.After(outboxtest.Patience)
	missing := maps.Clone(all)
	for len(missing) > 0 {
		select {
		case msg, open := <-from:
			if !open {
				t.Fatalf("the channel closed with %d of %d messages missing", len(missing), len(all))
			}
			want, known := all[msg.UUID]
			if !known || !want.same(msg) {
				t.Errorf("message %q came changed", msg.UUID)
			}
			delete(missing, msg.UUID)
			msg.Ack()
		case <-late:
			t.Fatalf("%d of %d messages never came", len(missing), len(all))
		}
	}
}

// post is a Publisher that hands on what reaches it.
type post chan *message.Message

func (p post) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		p <- msg
	}
	return nil
}
func (post) Close() error { return nil }
