// Package replica reads pages from a hot standby.
package replica

import (
	"context"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestMain(m *testing.M) { os.Exit(pgserver.Run(m)) }

// pair is an outbox on a primary, and a pool on its standby.
type pair struct {
	*outboxtest.Outbox

	primary, standby *pgserver.Server
	replica          *pgxpool.Pool
	sink             outboxtest.Sink
}

func newPair(t *testing.T, settings map[string]string) *pair {
	t.Helper()
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	primary, err := pgserver.Start(ctx, pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	closing(t, primary)
	p := &pair{Outbox: outboxtest.In(t, primary.DSN()), primary: primary}
	all := map[string]string{"log_statement": "all", "max_standby_streaming_delay": "0"}
	maps.Copy(all, settings)
	p.standby, err = primary.Standby(ctx, pgserver.Options{Settings: all})
	p.Must(err)
	closing(t, p.standby)
	p.Pool.Reset()
	p.replica = pgserver.Pool(t, p.standby.DSN())
	return p
}

func closing(t *testing.T, s *pgserver.Server) {
	t.Helper()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
}

// pages is how many pages the standby has served, or begun to.
func (p *pair) pages() int {
	p.Helper()
	log, err := os.ReadFile(p.standby.LogFile())
	p.Must(err)
	return strings.Count(string(log), "execute <unnamed>: SELECT id, xid, slot")
}

func (p *pair) subscribe(t *testing.T, log *outboxtest.Log) *pgoutbox.Subscriber {
	t.Helper()
	sub, err := pgoutbox.NewSubscriber(p.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group", Shards: 4, ReadPool: p.replica, PollInterval: 20 * time.Millisecond}, log)
	p.Must(err)
	messages, err := sub.Subscribe(context.WithoutCancel(t.Context()), pgoutbox.AllTopics)
	p.Must(err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for msg := range messages {
			p.sink.Add(outboxtest.Received("reader", msg))
			msg.Ack()
		}
	}()
	t.Cleanup(func() {
		if err := sub.Close(); err != nil {
			t.Error(err)
		}
		<-done
	})
	return sub
}

// put inserts rows and returns their UUIDs.
func (p *pair) put(what string, n int) []string {
	p.Helper()
	var uuids []string
	for i := range n {
		uuids = append(uuids, fmt.Sprintf("%s %d", what, i))
	}
	p.Exec("INSERT INTO outbox (topic, key, uuid) SELECT 'orders', 'key ' || n % 7, uuid FROM unnest($1::text[]) WITH ORDINALITY AS u (uuid, n) ORDER BY n", uuids)
	return uuids
}

func (p *pair) mustHaveComeOnce(t *testing.T) {
	t.Helper()
	for uuid, n := range p.sink.Times() {
		if n != 1 {
			t.Errorf("%s came %d times", uuid, n)
		}
	}
}
