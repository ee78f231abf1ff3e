package pgoutbox

import (
	"context"
	"database/sql"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// fakeExecer tells transactions apart; nothing is executed.
type fakeExecer struct{ name string }

func (*fakeExecer) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

// uncomparable panics in ==.
type uncomparable struct{ _ func() }

func (uncomparable) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}

func carrying(ctxs ...context.Context) []*message.Message {
	var all []*message.Message
	for _, ctx := range ctxs {
		msg := message.NewMessage("", nil)
		msg.SetContext(ctx)
		all = append(all, msg)
	}
	return all
}

func TestMessagesCarryOneTransactionOrNone(t *testing.T) {
	bg := context.Background()
	a, b := &fakeExecer{"a"}, &fakeExecer{"b"}
	std, otherStd := new(sql.Tx), new(sql.Tx)
	inA, inB := ContextWithTx(bg, a), ContextWithTx(bg, b)
	tests := []struct {
		name     string
		messages []*message.Message
		want     target
		carried  bool
		err      string
	}{
		{"none", carrying(bg, bg), target{}, false, ""},
		{"one", carrying(inA), target{execer: a}, true, ""},
		{"the same", carrying(inA, ContextWithTx(bg, a), inA), target{execer: a}, true, ""},
		{"the innermost", carrying(ContextWithTx(inA, b)), target{execer: b}, true, ""},
		{"the innermost, across kinds", carrying(ContextWithStdTx(inA, std)), target{std: std, isStd: true}, true, ""},
		{"the innermost, across kinds back", carrying(ContextWithTx(ContextWithStdTx(bg, std), a)), target{execer: a}, true, ""},
		{"the same of database/sql", carrying(ContextWithStdTx(bg, std), ContextWithStdTx(bg, std)), target{std: std, isStd: true}, true, ""},
		{"different ones", carrying(inA, inA, inB), target{}, false, "different transactions (messages 1 and 2)"},
		{"different kinds", carrying(inA, ContextWithStdTx(bg, std)), target{}, false, "different transactions"},
		{"different ones of database/sql", carrying(ContextWithStdTx(bg, otherStd), ContextWithStdTx(bg, std)), target{}, false, "different transactions"},
		{"some none", carrying(inA, bg), target{}, false, "some do not (messages 0 and 1)"},
		{"some none, the first", carrying(bg, inA), target{}, false, "some do not"},
		{"what cannot be compared", carrying(ContextWithTx(bg, uncomparable{}), ContextWithTx(bg, uncomparable{})), target{}, false, "different transactions"},
		{"nil and another", carrying(ContextWithTx(bg, nil), inA), target{}, false, "different transactions"},
		{"nil twice", carrying(ContextWithTx(bg, nil), ContextWithTx(bg, nil)), target{}, true, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, carried, err := carriedTarget(tt.messages)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v does not say %q", err, tt.err)
				}
				return
			}
			if err != nil || carried != tt.carried || got != tt.want {
				t.Errorf("got %v, %v, %v", got, carried, err)
			}
		})
	}
}

func TestNilTransactionIsAnError(t *testing.T) {
	p, err := NewPublisher(nil, PublisherConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	bg := context.Background()
	for name, publish := range map[string]func() error{
		"WithTx, nil":              func() error { return p.WithTx(nil).Publish("t", carrying(bg)...) },
		"WithTx, nil pool":         func() error { return p.WithTx((*pgxpool.Pool)(nil)).Publish("t", carrying(bg)...) },
		"WithTx, nil conn":         func() error { return p.WithTx((*pgx.Conn)(nil)).Publish("t", carrying(bg)...) },
		"WithTx, nil pgx.Tx":       func() error { return p.WithTx(pgx.Tx((*pgxpool.Tx)(nil))).Publish("t", carrying(bg)...) },
		"WithStdTx, nil":           func() error { return p.WithStdTx(nil).Publish("t", carrying(bg)...) },
		"ContextWithTx, nil":       func() error { return p.Publish("t", carrying(ContextWithTx(bg, nil))...) },
		"ContextWithTx, typed nil": func() error { return p.Publish("t", carrying(ContextWithTx(bg, (*pgxpool.Pool)(nil)))...) },
		"ContextWithStdTx, nil":    func() error { return p.Publish("t", carrying(ContextWithStdTx(bg, nil))...) },
	} {
		t.Run(name, func(t *testing.T) {
			if err := publish(); err == nil || !strings.Contains(err.Error(), "transaction is nil") {
				t.Errorf("error %v", err)
			}
		})
	}
}
