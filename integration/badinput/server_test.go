package badinput

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// ownServer starts a server for a test that stops it or changes what it is: one from local binaries, whatever the others run on.
func ownServer(t *testing.T) (*pgserver.Server, *outbox) {
	t.Helper()
	pgserver.Shared(t) // chosen first, as the environment wants it
	t.Setenv("PGOUTBOX_TEST_PROVIDER", "local")
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := pgserver.Start(ctx, pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	db := &outbox{outboxtest.Open(t, s.DSN()), "", newLog(t)}
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	return s, db
}

// restart brings the server back and makes the pool forget its broken connections.
func (db *outbox) restart(start func(context.Context) error) {
	db.Helper()
	if err := start(db.Context()); err != nil {
		db.Fatal(err)
	}
	db.Pool.Reset()
}

// A standby is waited for: nothing is emitted, nothing is created, everything comes after the promotion. So does what was written
// meanwhile by somebody who found the primary, which here is the same server.
func TestStandbyIsWaitedFor(t *testing.T) {
	s, db := ownServer(t)
	uuids := db.put(db.Pool, "before", 10)
	db.restart(s.Demote)
	if standby := db.Text("SELECT pg_is_in_recovery()"); standby != "true" {
		t.Fatal("the server is no standby")
	}

	pub, err := pgoutbox.NewPublisher(db.Pool, pgoutbox.PublisherConfig{}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("t", secret("refused")), "25006", "standby")
	if err := pgoutbox.Migrate(t.Context(), db.Pool, pgoutbox.SchemaConfig{}); err != nil {
		t.Errorf("Migrate of what is in place: %v", err)
	}
	sub := db.subscriber(db.Pool, db.group("group"))
	says(t, "SubscribeInitialize", sub.SubscribeInitialize("t"), "recovery", "standby")
	messages := db.subscribe(sub)
	bridge, err := pgoutbox.NewPublisherBridge(db.Pool, outboxtest.Nobody{T: t}, pgoutbox.BridgeConfig{ConsumerGroup: "bridge"}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var bridging sync.WaitGroup
	bridging.Go(func() {
		if err := bridge.Run(ctx); err != nil {
			t.Errorf("PublisherBridge.Run returned %v", err)
		}
	})
	db.log.Until(t, "error", "the subscription begins when it is", "recovery")
	db.log.Until(t, "error", "the bridge begins when it is", "recovery")
	db.log.Until(t, "error", "a new one is opened", "recovery")
	cancel()
	bridging.Wait()
	select {
	case msg := <-messages:
		t.Errorf("message %q came from a standby", msg.UUID)
	default:
	}
	if n := db.Text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"); n != "0" {
		t.Errorf("%s locks are held on a standby", n)
	}

	db.Exec("SELECT pg_promote()")
	uuids = append(uuids, db.put(db.Pool, "after", 10)...)
	db.receive(messages, uuids)
}

// Whoever starts before the database does waits for it, and counts its locks all the same.
func TestUnreachableServerIsWaitedFor(t *testing.T) {
	s, db := ownServer(t)
	uuids := db.put(db.Pool, "row", 10)
	if err := s.Stop(t.Context(), "fast"); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	sub := db.subscriber(db.Pool, db.group("group"))
	messages := db.subscribe(sub)
	if took := time.Since(began); took > 7*time.Second { // the first call's 5 s
		t.Errorf("Subscribe took %s", took)
	}
	says(t, "SubscribeInitialize", sub.SubscribeInitialize("t"), "connect the lock session")
	db.log.Until(t, "error", "the subscription begins when it is", "connect the lock session")
	db.Pool.Reset()
	pub, err := pgoutbox.NewPublisher(db.Pool, pgoutbox.PublisherConfig{}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("t", secret("uuid")), `"public"."outbox"`)
	db.restart(s.StartAgain)
	db.receive(messages, uuids)
}

// MaxLocks holds for a subscription that was made while the database was away, too.
func TestMaxLocksHoldsForASubscriptionMadeInTheDark(t *testing.T) {
	s, db := ownServer(t)
	cfg := db.group("group")
	cfg.MaxLocks = 20
	if err := s.Stop(t.Context(), "fast"); err != nil {
		t.Fatal(err)
	}
	sub := db.subscriber(db.Pool, cfg)
	ends := map[string]context.CancelFunc{}
	for _, topic := range []string{"first", "second"} { // 16 shards each
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ends[topic] = cancel
		if _, err := sub.Subscribe(ctx, topic); err != nil {
			t.Fatal(err)
		}
	}
	db.restart(s.StartAgain)
	db.log.Until(t, "error", "MaxLocks (20)")
	db.log.Until(t, "info", "leading", "shards:16")
	if n := db.Text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"); n != "16" {
		t.Errorf("%s locks are held", n)
	}
	led := db.Text("SELECT topic FROM outbox_consumers JOIN outbox_cursors ON consumer_id = id WHERE shard = 0 AND term > 0")
	ends[led]()
	db.log.Until(t, "info", "leading", "consumer:"+db.Text("SELECT id FROM outbox_consumers WHERE topic <> $1", led)) // in its place
}

// A password that is wrong may be right in a moment: it is waited for, and never told.
func TestWrongPasswordIsWaitedForAndNotTold(t *testing.T) {
	s, db := ownServer(t)
	uuids := db.put(db.Pool, "row", 10)
	db.Exec("CREATE ROLE rotated LOGIN SUPERUSER PASSWORD 'another'")
	hba := filepath.Join(s.DataDir(), "pg_hba.conf")
	rest, err := os.ReadFile(hba)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hba, append([]byte("host all rotated 127.0.0.1/32 scram-sha-256\n"), rest...), 0o600); err != nil {
		t.Fatal(err)
	}
	db.Exec("SELECT pg_reload_conf()")
	db.Exec("SELECT 1 FROM pg_hba_file_rules WHERE auth_method = 'scram-sha-256'")
	const password = hush + "password"
	dsn := strings.Replace(s.DSN(), "postgres@", "rotated:"+password+"@", 1)
	waitForRefusal(t, dsn)

	pool := pgserver.Pool(t, dsn)
	byPool, byLockConn := db.subscriber(pool, db.group("by pool")), db.subscriber(db.Pool, pgoutbox.SubscriberConfig{
		ConsumerGroup: "by LockConn", LockConn: dsn, RetryInterval: 20 * time.Millisecond,
	})
	says(t, "SubscribeInitialize", byPool.SubscribeInitialize("t"), "28P01", "rotated")
	one, other := db.subscribe(byPool), db.subscribe(byLockConn)
	pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("t", secret("uuid")), "28P01")
	says(t, "Migrate", pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{}), "28P01")
	db.log.Until(t, "error", "28P01", "by pool")
	db.log.Until(t, "error", "28P01", "by LockConn")
	db.Exec("ALTER ROLE rotated PASSWORD '" + password + "'")
	db.receive(one, uuids)
	db.receive(other, uuids)
}

// waitForRefusal waits until the server has read its new rules.
func waitForRefusal(t *testing.T, dsn string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), outboxtest.Patience)
	defer cancel()
	pool := pgserver.Pool(t, dsn)
	for {
		err := pool.Ping(ctx)
		if err != nil && strings.Contains(err.Error(), "28P01") {
			return
		}
		pool.Reset()
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("the server never asks for a password: %v", err)
		}
	}
}

// A server that is too old is refused before anything is asked of it that it would not know.
func TestOldServerIsRefused(t *testing.T) {
	dsn := oldServer(t)
	db := &outbox{outboxtest.Open(t, dsn, func(c *pgxpool.Config) { c.MaxConns = 4 }), "", newLog(t)}
	for what, err := range db.refusals(db.Pool, db.group("group")) {
		says(t, what, err, "PostgreSQL 13", "14 or newer")
	}
}

// oldServer is a stand-in for a server of version 13: it lets everybody in and answers the first question of a lock session. Any other
// statement fails the test.
func oldServer(t *testing.T) (dsn string) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer func() { _ = conn.Close() }()
				if err := serveOld(pgproto3.NewBackend(conn, conn)); err != nil {
					t.Error(err)
				}
			})
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	return fmt.Sprintf("postgres://user:%spassword@%s/database?sslmode=disable", hush, listener.Addr())
}

func serveOld(backend *pgproto3.Backend) error {
	const pid = "4711"
	if _, err := backend.ReceiveStartupMessage(); errors.Is(err, io.EOF) {
		return nil // a client that changed its mind
	} else if err != nil {
		return fmt.Errorf("receive the start-up message: %w", err)
	}
	backend.Send(&pgproto3.AuthenticationOk{})
	backend.Send(&pgproto3.ParameterStatus{Name: "server_version", Value: "13.22"})
	backend.Send(&pgproto3.ParameterStatus{Name: "client_encoding", Value: "UTF8"})
	backend.Send(&pgproto3.ParameterStatus{Name: "standard_conforming_strings", Value: "on"})
	backend.Send(&pgproto3.BackendKeyData{ProcessID: 4711, SecretKey: []byte{0, 0, 0, 1}})
	backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	if err := backend.Flush(); err != nil {
		return err
	}
	for {
		received, err := backend.Receive()
		if err != nil {
			return nil //nolint:nilerr // the client has gone
		}
		switch received := received.(type) {
		case *pgproto3.Parse:
			if !strings.Contains(received.Query, "server_version_num") {
				return fmt.Errorf("a server of version 13 was asked: %s", received.Query)
			}
			backend.Send(&pgproto3.ParseComplete{})
		case *pgproto3.Bind:
			backend.Send(&pgproto3.BindComplete{})
		case *pgproto3.Describe:
			var fields []pgproto3.FieldDescription
			for _, name := range []string{"pid", "synchronous_commit", "version"} {
				fields = append(fields, pgproto3.FieldDescription{Name: []byte(name), DataTypeOID: 25, DataTypeSize: -1, TypeModifier: -1})
			}
			backend.Send(&pgproto3.RowDescription{Fields: fields})
		case *pgproto3.Execute:
			backend.Send(&pgproto3.DataRow{Values: [][]byte{[]byte(pid), []byte("on"), []byte("130022")}})
			backend.Send(&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")})
		case *pgproto3.Sync:
			backend.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
			if err := backend.Flush(); err != nil {
				return nil //nolint:nilerr // as above
			}
		case *pgproto3.Terminate:
			return nil
		}
	}
}
