package traps

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Whoever waits for the key's lock in the VALUES of its INSERT comes after the one it waited for, whatever it waits in. A
// table that draws its id first tells the wrong order.
func TestWaiterComesAfterTheHolderOfTheLock(t *testing.T) {
	t.Parallel()
	waits := map[string]string{
		"a sub-select":       "(SELECT 'waiter' FROM orders WHERE id = 1 FOR UPDATE)",
		"a function":         "waiting('waiter')",
		"an advisory lock":   "(SELECT 'waiter' FROM pg_advisory_xact_lock(77))",
		"a function, by key": "waiting_key('waiter')",
	}
	for name, value := range waits {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newOutbox(t)
			db.Exec(`
				CREATE TABLE orders (id int PRIMARY KEY);
				INSERT INTO orders VALUES (1);
				CREATE TABLE twin (id bigint GENERATED ALWAYS AS IDENTITY, topic text, key text, uuid text);
				CREATE FUNCTION waiting(uuid text) RETURNS text LANGUAGE plpgsql AS
					$$ BEGIN PERFORM FROM orders WHERE id = 1 FOR UPDATE; RETURN uuid; END $$;
				CREATE FUNCTION waiting_key(uuid text) RETURNS text LANGUAGE plpgsql AS
					$$ BEGIN PERFORM pg_advisory_xact_lock(77); RETURN uuid; END $$;`)
			r := db.receive(db.Pool, inOrder(), nil)
			for _, table := range []string{"outbox", "twin"} {
				holder := db.Begin()
				db.ExecOn(holder, "SELECT pg_advisory_xact_lock(77)")
				db.ExecOn(holder, "SELECT FROM orders WHERE id = 1 FOR UPDATE")
				waiter := pgserver.Pool(t, db.DSN, outboxtest.Setting("application_name", "waiter"))
				done := make(chan error, 1)
				go func() {
					_, err := waiter.Exec(t.Context(), "INSERT INTO "+table+" (topic, key, uuid) VALUES ('t', 'k', "+value+")")
					done <- err
				}()
				db.blocked("waiter", 1)
				db.ExecOn(holder, "INSERT INTO "+table+" (topic, key, uuid) VALUES ('t', 'k', 'holder')")
				db.Commit(holder)
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			if twin := db.Text("SELECT string_agg(uuid, ' ' ORDER BY id) FROM twin"); twin != "waiter holder" {
				t.Errorf("the trap is none: the twin's order is %s", twin)
			}
			r.exactly("holder", "waiter")
		})
	}
}

// COPY draws ids and transaction ids as INSERT does, also when it takes long.
func TestCopyIsAFullCitizen(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	r := db.receive(db.Pool, inOrder(), nil)
	r.settle()
	slow := db.Begin()
	columns := []string{"topic", "key", "uuid", "payload"}
	copyOn := func(on interface {
		CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error)
	}, uuids []string) {
		_, err := on.CopyFrom(t.Context(), pgx.Identifier{"outbox"}, columns, pgx.CopyFromSlice(len(uuids), func(i int) ([]any, error) {
			return []any{"t", "k", uuids[i], []byte("copied")}, nil
		}))
		if err != nil {
			t.Fatal(err)
		}
	}
	copyOn(slow, numbered("slow", 1500))
	copyOn(db.Pool, numbered("fast", 1500))
	r.until(numbered("fast", 1500)...)
	db.Commit(slow)
	r.exactly(append(numbered("fast", 1500), numbered("slow", 1500)...)...)
}

// A prepared transaction is open until another session ends it, maybe never. Only its own rows wait.
func TestPreparedTransactionsHoldNobodyUp(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	if db.number("SELECT current_setting('max_prepared_transactions')::bigint") == 0 {
		t.Fatal("the server must allow prepared transactions: max_prepared_transactions = 20")
	}
	prefix := fmt.Sprintf("traps_%d_%s_", os.Getpid(), db.Text("SELECT current_database()"))
	for _, name := range []string{"commit", "rollback", "forgotten"} {
		tx := db.Begin()
		db.put(tx, "prepared "+name)
		db.ExecOn(tx, "PREPARE TRANSACTION '"+prefix+name+"'")
		_ = tx.Rollback(t.Context()) // the session has no transaction any more
	}
	r := db.receive(db.Pool, inOrder(), nil)
	rows := numbered("row", 50)
	db.put(db.Pool, rows...)
	r.until(rows...)
	db.Exec("COMMIT PREPARED '" + prefix + "commit'")
	db.Exec("ROLLBACK PREPARED '" + prefix + "rollback'")
	r.exactly(append(rows, "prepared commit")...)
	r.close()
	db.Exec("COMMIT PREPARED '" + prefix + "forgotten'")
	r = db.receive(db.Pool, inOrder(), nil)
	r.exactly("prepared forgotten")
}

// The slot of a key is for ever: these values were computed once and hold for every server version.
func TestShardOfAKeyIsForEver(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	slots := map[string]int{"order-1": 203, "order-2": 44, "customer/42": 219, "ключ": 128, "🔑": 159, " ": 178, "a\tb": 79}
	for key := range slots {
		db.Exec("INSERT INTO outbox (topic, key, uuid) VALUES ('t', $1, $1)", key)
	}
	db.Exec("INSERT INTO outbox (topic, uuid) VALUES ('t', 'order-1')") // without a key the uuid counts
	for _, shards := range []int{1, 16, 100, 256} {
		cfg := inOrder()
		cfg.ConsumerGroup, cfg.Shards = fmt.Sprintf("%d shards", shards), shards
		r := db.receive(db.Pool, cfg, nil)
		for key := range slots {
			r.until(key)
		}
		r.settle()
		for _, d := range r.All() {
			if slot, ok := slots[d.UUID]; ok && d.Shard != slot%shards {
				t.Errorf("key %q is in shard %d of %d, want %d", d.UUID, d.Shard, shards, slot%shards)
			}
		}
		r.close()
	}
}

// Row-level security hides rows without an error. A relay that it applies to must say so, and read nothing rather than skip.
func TestRowLevelSecurityIsLoud(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	role := "relay_of_" + db.Text("SELECT current_database()")
	db.Exec("CREATE ROLE " + role + " NOSUPERUSER NOBYPASSRLS")
	t.Cleanup(func() {
		if _, err := db.Pool.Exec(context.WithoutCancel(t.Context()), "REASSIGN OWNED BY "+role+" TO CURRENT_USER; DROP OWNED BY "+role+"; DROP ROLE "+role); err != nil {
			t.Error(err)
		}
	})
	db.Exec("ALTER TABLE outbox OWNER TO " + role) // an owner is exempt, unless FORCE says otherwise
	db.Exec("GRANT USAGE ON SCHEMA public TO " + role)
	db.Exec("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO " + role)
	db.Exec("GRANT SELECT ON ALL SEQUENCES IN SCHEMA public TO " + role)
	db.Exec("ALTER TABLE outbox ENABLE ROW LEVEL SECURITY; ALTER TABLE outbox FORCE ROW LEVEL SECURITY")
	db.put(db.Pool, "row 1", "row 2")
	pool, _ := db.newPool(outboxtest.Setting("role", role))
	var seen int
	if err := pool.QueryRow(t.Context(), "SELECT count(*) FROM outbox").Scan(&seen); err != nil || seen != 0 {
		t.Fatalf("the trap is none: %d rows, %v", seen, err)
	}
	r := db.receive(pool, inOrder(), nil)
	r.log.Until(t, "row-level security")
	if n := len(r.All()); n > 0 {
		t.Errorf("%d rows were delivered", n)
	}
	if state := db.Text("SELECT string_agg(after_high || ' ' || last_id, ',') FROM outbox_cursors"); state != "0 0" {
		t.Errorf("the position moved over rows that were not seen: %s", state)
	}
	db.Exec("ALTER ROLE " + role + " BYPASSRLS")
	r.exactly("row 1", "row 2")
}

// A sequence that caches ids hands them to sessions in blocks: the later transaction gets the lower id.
func TestSequenceThatCachesIsRefused(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.Exec("ALTER SEQUENCE outbox_id_seq CACHE 10")
	one, other := db.Begin(), db.Begin()
	db.put(one, "first")
	db.put(other, "second")
	db.Commit(other)
	db.put(one, "third")
	db.Commit(one)
	if order := db.Text("SELECT string_agg(uuid, ' ' ORDER BY id) FROM outbox"); order != "first third second" {
		t.Fatalf("the trap is none: %s", order)
	}
	const fix = "ALTER SEQUENCE \"public\".\"outbox_id_seq\" CACHE 1"
	sub, err := pgoutbox.NewSubscriber(db.Pool, inOrder(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sub.Close() }()
	_, subscribed := sub.Subscribe(t.Context(), "t")
	bridge, err := pgoutbox.NewPublisherBridge(db.Pool, nobody{t}, pgoutbox.BridgeConfig{ConsumerGroup: "bridge"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	leader, err := pgoutbox.NewLeader(db.Pool, pgoutbox.LeaderConfig{Name: "leader"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), outboxtest.Patience/4) // ends those that are not refused
	defer cancel()
	for what, err := range map[string]error{
		"Subscribe":           subscribed,
		"SubscribeInitialize": sub.SubscribeInitialize("t"),
		"PublisherBridge.Run": bridge.Run(ctx),
		"Leader.Run":          leader.Run(ctx, func(context.Context, pgoutbox.Lead) error { return nil }),
	} {
		if err == nil || !strings.Contains(err.Error(), fix) {
			t.Errorf("%s returned %v, which does not say how to mend it", what, err)
		}
	}
	if n := db.Text("SELECT count(*) FROM outbox_consumers"); n != "0" {
		t.Errorf("%s consumers were created", n)
	}
	db.Exec(fix)
	if err := sub.SubscribeInitialize("t"); err != nil {
		t.Error(err)
	}
}

// nobody is a Publisher that nothing should reach.
type nobody struct{ *testing.T }

func (t nobody) Publish(string, ...*message.Message) error {
	t.Error("a row was published")
	return nil
}

func (t nobody) Close() error {
	t.Error("the publisher was closed")
	return nil
}
