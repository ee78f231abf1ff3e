package writeside

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"

	"github.com/jackc/pgx/v5/pgxpool"
)

func TestPublishSaysWhatToDo(t *testing.T) {
	db := database{outboxtest.New(t)}
	_, pool := db.Role()
	std := openStd(t, "postgres", db.DSN)
	failed, err := std.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = failed.Rollback() }()
	if _, err := failed.ExecContext(t.Context(), "SELECT 1/0"); err == nil {
		t.Fatal("no error")
	}
	finished := db.Begin()
	db.Commit(finished)
	tests := []struct {
		name         string
		publish      func() error
		state, wants string
	}{
		{"no table", func() error {
			return newPublisher(t, db.Pool, pgoutbox.PublisherConfig{Table: "absent"}).Publish("t", messages("a")...)
		}, "42P01", "run Migrate"},
		{"no schema", func() error {
			return newPublisher(t, db.Pool, pgoutbox.PublisherConfig{Schema: "absent"}).Publish("t", messages("a")...)
		}, "42P01", "run Migrate"},
		{"no right", func() error {
			return newPublisher(t, pool, pgoutbox.PublisherConfig{}).Publish("t", messages("a")...)
		}, "42501", `GRANT INSERT (topic, key, uuid, metadata, payload) ON "public"."outbox"`},
		{"a failed transaction of lib/pq", func() error {
			return newPublisher(t, nil, pgoutbox.PublisherConfig{}).WithStdTx(failed).Publish("t", messages("a")...)
		}, "25P02", "roll back"},
		{"a read-only role", func() error {
			return newPublisher(t, pgserver.Pool(t, db.DSN, outboxtest.Setting("default_transaction_read_only", "on")), pgoutbox.PublisherConfig{}).
				Publish("t", messages("a")...)
		}, "25006", "read-only"},
		{"a finished transaction", func() error {
			return newPublisher(t, nil, pgoutbox.PublisherConfig{}).WithTx(finished).Publish("t", messages("a")...)
		}, "", "tx is closed"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := tt.publish()
			if err == nil || sqlState(err) != tt.state || !strings.Contains(err.Error(), tt.wants) {
				t.Errorf("error %v", err)
			}
			if errors.Is(err, pgoutbox.ErrUnknownOutcome) {
				t.Errorf("error %v claims an unknown outcome", err)
			}
			if err != nil && strings.Count(err.Error(), "pgoutbox:") != 1 {
				t.Errorf("error %v does not name the package once", err)
			}
		})
	}
}

func TestErrorsTellNoValues(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	db.Exec("ALTER TABLE outbox ADD CHECK (uuid <> 'secret-uuid')")
	msg := messages("secret-uuid")[0]
	msg.Payload = []byte("secret-payload")
	msg.Metadata.Set("secret-key", "secret-value")
	std := openStd(t, "postgres", db.DSN)
	tx, err := std.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	for _, err := range []error{pub.Publish("t", msg), pub.WithStdTx(tx).Publish("t", msg)} {
		if sqlState(err) != "23514" || strings.Contains(err.Error(), "secret-") {
			t.Errorf("error %v", err)
		}
	}
}

// wire is a connection whose answers can be lost: the server's are read, so it has done its work, and dropped.
type wire struct {
	net.Conn

	lose *atomic.Bool
}

func (w wire) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if w.lose.Load() {
		_ = w.Close()
		return 0, io.ErrUnexpectedEOF
	}
	return n, err
}

func (w wire) cut(cfg *pgxpool.Config) {
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := new(net.Dialer).DialContext(ctx, network, addr)
		return wire{conn, w.lose}, err
	}
}

func TestFC71_LostAnswerIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	w := wire{lose: new(atomic.Bool)}
	pool := pgserver.Pool(t, db.DSN, w.cut)
	pub := newPublisher(t, pool, pgoutbox.PublisherConfig{})
	for range 20 {
		if err := pub.Publish("t", messages("stored and told")...); err != nil { // a connection that works
			t.Fatal(err)
		}
		w.lose.Store(true)
		err := pub.Publish("t", messages("stored, not told")...)
		w.lose.Store(false)
		if !errors.Is(err, pgoutbox.ErrUnknownOutcome) || !strings.Contains(err.Error(), "unknown outcome") {
			t.Errorf("error %v", err)
		}

		tx := begin(t, pool)
		w.lose.Store(true)
		err = pub.WithTx(tx).Publish("t", messages("rolled back")...)
		w.lose.Store(false)
		if err == nil || errors.Is(err, pgoutbox.ErrUnknownOutcome) {
			t.Errorf("in a transaction: %v", err)
		}
		if err := tx.Commit(t.Context()); err == nil {
			t.Error("a transaction with a lost message commits")
		}
	}
	// The last insert may still be on its way in the server: a lock that it conflicts with waits for it.
	db.Exec("BEGIN; LOCK TABLE outbox IN SHARE MODE; COMMIT")
	for uuid, want := range map[string]string{"stored and told": "20", "stored, not told": "20", "rolled back": "0"} {
		if n := db.Text("SELECT count(*) FROM outbox WHERE uuid = $1", uuid); n != want {
			t.Errorf("%s: %s rows, want %s", uuid, n, want)
		}
	}
}

func TestUnreachableServerIsNoUnknownOutcome(t *testing.T) {
	t.Parallel()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	pool := pgserver.Pool(t, "postgres://nobody@"+addr+"/none?sslmode=disable")
	err = newPublisher(t, pool, pgoutbox.PublisherConfig{}).Publish("t", messages("a")...)
	if err == nil || errors.Is(err, pgoutbox.ErrUnknownOutcome) || !strings.Contains(err.Error(), "nothing was sent") {
		t.Errorf("error %v", err)
	}
}

func TestTerminatedSessionIsAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	locker := db.Begin()
	if _, err := locker.Exec(t.Context(), "LOCK TABLE outbox"); err != nil {
		t.Fatal(err)
	}
	pool := pgserver.Pool(t, db.DSN, outboxtest.Setting("application_name", "victim"))
	var wg sync.WaitGroup
	wg.Go(func() {
		err := newPublisher(t, pool, pgoutbox.PublisherConfig{}).Publish("t", messages("a")...)
		if !errors.Is(err, pgoutbox.ErrUnknownOutcome) || sqlState(err) != "57P01" {
			t.Errorf("error %v", err)
		}
	})
	db.whenBlocked(t, "victim")
	db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim'")
	wg.Wait()
}

// whenBlocked returns when a session of that application waits for a lock.
func (db database) whenBlocked(t *testing.T, application string) {
	t.Helper()
	poll := time.NewTicker(10 * time.Millisecond)
	defer poll.Stop()
	for {
		blocked := db.Text(`SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'`, application)
		if blocked != "0" {
			return
		}
		select {
		case <-poll.C:
		case <-t.Context().Done():
			t.Fatal("nobody waits")
		}
	}
}

func TestAnyMessagesContextEndsAPublishThatWaits(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	locker := db.Begin()
	if _, err := locker.Exec(t.Context(), "LOCK TABLE outbox"); err != nil {
		t.Fatal(err)
	}
	pool := pgserver.Pool(t, db.DSN, outboxtest.Setting("application_name", "waits"))
	pub := newPublisher(t, pool, pgoutbox.PublisherConfig{})
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("the request is over")
	bounded, release := context.WithTimeout(t.Context(), 20*time.Second)
	defer release()
	msgs := inContext(bounded, messages("a", "b")...)
	msgs[1].SetContext(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		err := pub.Publish("t", msgs...)
		if !errors.Is(err, context.Canceled) || !errors.Is(err, reason) || !errors.Is(err, pgoutbox.ErrUnknownOutcome) {
			t.Errorf("error %v", err)
		}
	})
	db.whenBlocked(t, "waits")
	cancel(reason)
	wg.Wait()
	if t.Failed() {
		return // nothing would ever wait below
	}

	stdTx, err := openStd(t, "postgres", db.DSN+"&application_name=waits_too").BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stdTx.Rollback() }()
	ctx, cancel = context.WithCancelCause(t.Context())
	msgs[1].SetContext(ctx)
	wg.Go(func() {
		err := pub.WithStdTx(stdTx).Publish("t", msgs...)
		if !errors.Is(err, reason) || errors.Is(err, pgoutbox.ErrUnknownOutcome) {
			t.Errorf("error %v", err)
		}
	})
	db.whenBlocked(t, "waits_too")
	cancel(reason)
	wg.Wait()
}
