package writeside

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"

	"github.com/ThreeDotsLabs/watermill/components/cqrs"
	"github.com/jackc/pgx/v5"
)

func TestMessagesCommitWithTheTransaction(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	std := openStd(t, "pgx", db.DSN)
	for _, committed := range []bool{false, true} {
		uuid := fmt.Sprint("committed=", committed)
		tx := db.Begin()
		stdTx, err := std.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		ctx := context.Background()
		for _, err := range []error{
			pub.WithTx(tx).Publish("t", messages(uuid+",WithTx")...),
			pub.Publish("t", inContext(pgoutbox.ContextWithTx(ctx, tx), messages(uuid+",ContextWithTx")...)...),
			pub.WithStdTx(stdTx).Publish("t", messages(uuid+",WithStdTx")...),
			pub.Publish("t", inContext(pgoutbox.ContextWithStdTx(ctx, stdTx), messages(uuid+",ContextWithStdTx")...)...),
		} {
			if err != nil {
				t.Error(err)
			}
		}
		if got := db.uuids(t); got != "" {
			t.Errorf("visible before the commit: %s", got)
		}
		if committed {
			db.Commit(tx)
			if err := stdTx.Commit(); err != nil {
				t.Error(err)
			}
			continue
		}
		if err := tx.Rollback(ctx); err != nil {
			t.Error(err)
		}
		if err := stdTx.Rollback(); err != nil {
			t.Error(err)
		}
	}
	want := "committed=true,WithTx committed=true,ContextWithTx committed=true,WithStdTx committed=true,ContextWithStdTx"
	if got := db.uuids(t); got != want {
		t.Errorf("got %s", got)
	}
}

func TestOneEventBusJoinsEveryTransaction(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, nil, pgoutbox.PublisherConfig{}) // no pool: never outside a transaction
	bus, err := cqrs.NewEventBusWithConfig(pub, cqrs.EventBusConfig{
		GeneratePublishTopic: func(cqrs.GenerateEventPublishTopicParams) (string, error) { return "events", nil },
		Marshaler:            cqrs.JSONMarshaler{},
	})
	if err != nil {
		t.Fatal(err)
	}
	type event struct{ Number int }
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
			if err := bus.Publish(pgoutbox.ContextWithTx(t.Context(), tx), event{i}); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				if err := tx.Commit(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if n := db.Text("SELECT count(*) FROM outbox"); n != "10" {
		t.Errorf("%s events of 10 commits", n)
	}
	if err := bus.Publish(t.Context(), event{}); err == nil || !strings.Contains(err.Error(), pgoutbox.ErrNoTransaction.Error()) {
		t.Errorf("outside a transaction: %v", err)
	}
}

func TestFC47_SavepointsTakeTheirMessagesWithThem(t *testing.T) {
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	ctx := t.Context()
	nested := func(t *testing.T, tx pgx.Tx) pgx.Tx {
		t.Helper()
		inner, err := tx.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return inner
	}
	publish := func(t *testing.T, tx pgx.Tx, uuid string) {
		t.Helper()
		if err := pub.WithTx(tx).Publish("t", messages(uuid)...); err != nil {
			t.Fatal(err)
		}
	}
	tests := []struct {
		name string
		run  func(t *testing.T, tx pgx.Tx)
		want string
	}{
		{"nested roll-back", func(t *testing.T, tx pgx.Tx) {
			publish(t, tx, "m1")
			inner := nested(t, tx)
			publish(t, inner, "m2")
			if err := inner.Rollback(ctx); err != nil {
				t.Error(err)
			}
			publish(t, tx, "m3")
			db.Commit(tx)
		}, "m1 m3"},
		{"nested commit, outer roll-back", func(t *testing.T, tx pgx.Tx) {
			publish(t, tx, "m1")
			inner := nested(t, tx)
			publish(t, inner, "m2")
			db.Commit(inner)
			if err := tx.Rollback(ctx); err != nil {
				t.Error(err)
			}
		}, ""},
		{"a nested failure leaves the outer usable", func(t *testing.T, tx pgx.Tx) {
			publish(t, tx, "m1")
			inner := nested(t, tx)
			if _, err := inner.Exec(ctx, "SELECT 1/0"); err == nil {
				t.Error("no error")
			}
			if err := pub.WithTx(inner).Publish("t", messages("m2")...); sqlState(err) != "25P02" {
				t.Errorf("error %v", err)
			}
			if err := inner.Rollback(ctx); err != nil {
				t.Error(err)
			}
			publish(t, tx, "m3")
			db.Commit(tx)
		}, "m1 m3"},
		{"the outer transaction in the context, the savepoint named", func(t *testing.T, tx pgx.Tx) {
			inner := nested(t, tx)
			msgs := inContext(pgoutbox.ContextWithTx(ctx, tx), messages("m1")...)
			if err := pub.WithTx(inner).Publish("t", msgs...); err != nil {
				t.Error(err)
			}
			if err := inner.Rollback(ctx); err != nil {
				t.Error(err)
			}
			db.Commit(tx)
		}, ""},
		{"100 levels, every second rolled back", func(t *testing.T, tx pgx.Tx) {
			levels := []pgx.Tx{tx}
			for i := range 100 {
				inner := nested(t, levels[i])
				publish(t, inner, fmt.Sprint(i))
				levels = append(levels, inner)
			}
			for i := 100; i > 0; i-- {
				if i == 51 { // takes 50 to 99 along
					if err := levels[i].Rollback(ctx); err != nil {
						t.Error(err)
					}
					continue
				}
				db.Commit(levels[i])
			}
			db.Commit(tx)
		}, strings.Trim(fmt.Sprint(firstNumbers(50)), "[]")},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			db.Exec("TRUNCATE outbox")
			tt.run(t, db.Begin())
			if got := db.uuids(t); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func firstNumbers(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

func TestRefusedArgumentsLeaveTheTransactionUsable(t *testing.T) {
	t.Parallel()
	db := database{outboxtest.New(t)}
	pub := newPublisher(t, db.Pool, pgoutbox.PublisherConfig{})
	tx, other := db.Begin(), db.Begin()
	in := func(tx pgx.Tx) context.Context { return pgoutbox.ContextWithTx(t.Context(), tx) }
	ended, cancel := context.WithCancel(in(tx))
	cancel()
	bad := messages("a", "b")
	bad[1].Metadata.Set("k", "\x00")
	for name, err := range map[string]error{
		"no topic":         pub.WithTx(tx).Publish("", messages("a")...),
		"a NUL":            pub.WithTx(tx).Publish("t", bad...),
		"an ended context": pub.WithTx(tx).Publish("t", inContext(ended, messages("a")...)...),
		"two transactions": pub.Publish("t", append(inContext(in(tx), messages("a")...), inContext(in(other), messages("b")...)...)...),
		"one of two in a transaction": pub.Publish("t",
			append(inContext(in(tx), messages("a")...), messages("b")...)...),
	} {
		if err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
	if err := pub.WithTx(tx).Publish("t", messages("good")...); err != nil {
		t.Fatal(err)
	}
	db.Commit(tx)
	if got := db.uuids(t); got != "good" {
		t.Errorf("stored %q", got)
	}
}

func TestFC48_PublishAddsNoSerializationFailure(t *testing.T) {
	t.Parallel()
	for _, isolation := range []string{"serializable", "repeatable read"} {
		t.Run(isolation, func(t *testing.T) {
			t.Parallel()
			db := database{outboxtest.New(t)}
			_, pool := db.writer(t, outboxtest.Setting("default_transaction_isolation", isolation))
			pub := newPublisher(t, nil, pgoutbox.PublisherConfig{})
			var wg sync.WaitGroup
			const writers, each = 20, 10
			for w := range writers {
				// A table each: on a shared one, the predicate locks of the business rows themselves would conflict.
				db.Exec(fmt.Sprintf("CREATE TABLE business_%d (n int); GRANT ALL ON business_%[1]d TO PUBLIC", w))
			}
			for w := range writers {
				wg.Go(func() {
					for i := range each {
						tx, err := pool.Begin(t.Context())
						if err != nil {
							t.Error(err)
							return
						}
						_, err = tx.Exec(t.Context(), fmt.Sprintf("INSERT INTO business_%d SELECT count(*) FROM business_%[1]d", w))
						if err == nil {
							err = pub.WithTx(tx).Publish("t", messages(fmt.Sprint(w, ".", i))...)
						}
						if err == nil {
							err = tx.Commit(t.Context())
						}
						if err != nil {
							t.Errorf("writer %d: %v", w, err)
							_ = tx.Rollback(context.WithoutCancel(t.Context()))
						}
					}
				})
			}
			wg.Wait()
			if n := db.Text("SELECT count(*) FROM outbox"); n != fmt.Sprint(writers*each) {
				t.Errorf("%s rows", n)
			}
		})
	}
}
