package cases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-31: two outboxes of one database, equal in topic and group, must not meet in their locks.
func TestFC31_TwoSchemasOfOneDatabaseDoNotMeet(t *testing.T) {
	t.Parallel()
	pool := pgserver.Pool(t, pgserver.Database(t), func(c *pgxpool.Config) { c.MaxConns = 10 })
	sinks := map[string]*sink{"one": newSink(), "two": newSink()}
	publish := func(schema, uuid string) {
		_, err := pool.Exec(t.Context(), "INSERT INTO "+schema+".outbox (topic, uuid, key) VALUES ($1, $2, 'key')", outboxtest.Topic, uuid)
		must(t, err)
	}
	for schema, s := range sinks {
		must(t, pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{Schema: schema}))
		publish(schema, "m1 of "+schema)
		newReader(t, pool, func(c *pgoutbox.SubscriberConfig) { c.Schema = schema }).subscribe(t, schema, s, ackAll)
	}
	for schema, s := range sinks { // both at the same time
		publish(schema, "m2 of "+schema)
		s.await(t, 10*time.Second, "m1 of "+schema, "m2 of "+schema)
	}
	for schema, s := range sinks {
		s.mustHaveComeOnce(t)
		if n := len(s.All()); n != 2 {
			t.Errorf("schema %s got %d messages, want its own 2", schema, n)
		}
	}
}

// Somebody else holds the very number of a shard's lock. It is named, the other shards are led, and the shard follows when
// the number is free.
func TestFC31_StrangerWithALockOfOursIsNamed(t *testing.T) {
	t.Parallel()
	const retry = 2 * time.Second
	ob, s := newOutbox(t), newSink()
	two := func(c *pgoutbox.SubscriberConfig) { c.Shards, c.RetryInterval = 2, retry }
	r := ob.read(t, "P1", s, ackAll, two)
	ob.AwaitLocks(2)
	inShard := []string{ob.KeyIn(0, 2, 0), ob.KeyIn(1, 2, 0)}
	key := outboxtest.Ask[int64](ob.Outbox, `SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1`)
	r.close(t)
	ob.MustBeClean()

	cfg, err := pgx.ParseConfig(ob.DSN)
	must(t, err)
	cfg.RuntimeParams["application_name"] = "somebody else"
	stranger, err := pgx.ConnectConfig(t.Context(), cfg)
	must(t, err)
	defer stranger.Close(context.WithoutCancel(t.Context()))
	_, err = stranger.Exec(t.Context(), "SELECT pg_advisory_lock($1)", key)
	must(t, err)

	r = ob.read(t, "P1 again", s, ackAll, two)
	ob.AwaitLocks(2) // one of them the stranger's
	pid := fmt.Sprint(stranger.PgConn().PID())
	outboxtest.Eventually(t, 3*retry, "LOUD: the stranger is named", func() (bool, string) {
		for _, line := range r.log.Lines("somebody else") {
			if line.Level == "error" && fmt.Sprint(line.Fields["pid"]) == pid {
				return true, ""
			}
		}
		return false, fmt.Sprint(r.log.Lines())
	})
	ob.put(t, inShard[0], "to shard 0")
	ob.put(t, inShard[1], "to shard 1")
	s.Await(t, 5*time.Second, func(log []delivery) (bool, string) { return len(log) == 1, "the other shard is not led" })
	must(t, stranger.Close(t.Context()))
	s.await(t, 2*retry, "to shard 0", "to shard 1")
	ob.judge(t, s)
	r.close(t)
	s.mustHaveComeOnce(t)
}
