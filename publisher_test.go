package pgoutbox

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5/pgconn"
)

// recorder is a transaction that remembers what it was asked, and answers with err.
type recorder struct {
	mu         sync.Mutex
	statements []string
	ctx        context.Context
	err        error
}

func (r *recorder) Exec(ctx context.Context, sql string, _ ...any) (pgconn.CommandTag, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.statements, r.ctx = append(r.statements, sql), ctx
	return pgconn.CommandTag{}, r.err
}

func newTestPublisher(t *testing.T, cfg PublisherConfig) *Publisher {
	t.Helper()
	p, err := NewPublisher(nil, cfg, nil)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPublisherRefusesWrongNames(t *testing.T) {
	_, err := NewPublisher(nil, PublisherConfig{Schema: "\x00", Table: strings.Repeat("x", 60)}, nil)
	if err == nil || !strings.Contains(err.Error(), "Schema") || !strings.Contains(err.Error(), "Table") {
		t.Errorf("error %v does not name both fields", err)
	}
	if strings.Count(err.Error(), "pgoutbox:") != 1 {
		t.Errorf("error %v does not name the package once", err)
	}
}

func TestPublishSendsNothingWhenItRefuses(t *testing.T) {
	p := newTestPublisher(t, PublisherConfig{})
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	tx := new(recorder)
	in := ContextWithTx(context.Background(), tx)
	tests := []struct {
		name  string
		topic string
		msgs  []*message.Message
		is    error
	}{
		{"no topic", "", carrying(in), nil},
		{"invalid text", "\xff", carrying(in), nil},
		{"a nil message", "t", append(carrying(in), nil), nil},
		{"a nil message first", "t", append([]*message.Message{nil}, carrying(in)...), nil},
		{"an ended context", "t", carrying(ContextWithTx(cancelled, tx)), context.Canceled},
		{"an ended context of a later message", "t", carrying(in, in, ContextWithTx(cancelled, tx)), context.Canceled},
		{"only some in the transaction", "t", carrying(in, context.Background()), nil},
		{"no transaction", "t", carrying(context.Background()), ErrNoTransaction},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := p.Publish(tt.topic, tt.msgs...)
			if err == nil || (tt.is != nil && !errors.Is(err, tt.is)) {
				t.Errorf("error %v, want %v", err, tt.is)
			}
			if err != nil && strings.Count(err.Error(), "pgoutbox:") != 1 {
				t.Errorf("error %v does not name the package once", err)
			}
		})
	}
	if len(tx.statements) > 0 {
		t.Errorf("sent %q", tx.statements)
	}
}

func TestPublishOfNothingSendsNothing(t *testing.T) {
	tx := new(recorder)
	if err := newTestPublisher(t, PublisherConfig{}).WithTx(tx).Publish("t"); err != nil || len(tx.statements) > 0 {
		t.Errorf("error %v, sent %q", err, tx.statements)
	}
}

func TestBoundTransactionWinsOverTheContexts(t *testing.T) {
	bound, carried := new(recorder), new(recorder)
	p := newTestPublisher(t, PublisherConfig{})
	msgs := carrying(ContextWithTx(context.Background(), carried), context.Background())
	if err := p.WithTx(bound).Publish("t", msgs...); err != nil {
		t.Fatal(err)
	}
	if len(bound.statements) != 1 || len(carried.statements) != 0 {
		t.Errorf("bound ran %d statements, carried %d", len(bound.statements), len(carried.statements))
	}
	if err := p.WithTx(carried).WithTx(bound).Publish("t", msgs...); err != nil || len(bound.statements) != 2 {
		t.Errorf("the last binding does not win: %v", err)
	}
}

func TestClosedPublisherPublishesNothing(t *testing.T) {
	p := newTestPublisher(t, PublisherConfig{})
	tx := new(recorder)
	bound := p.WithTx(tx)
	if err := bound.Close(); err != nil {
		t.Fatal(err)
	}
	if err := bound.Publish("t", carrying(context.Background())...); err != nil {
		t.Errorf("Close of a bound copy closed it: %v", err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for name, pub := range map[string]*Publisher{"itself": p, "a copy made before": bound, "a copy made after": p.WithTx(tx)} {
		if err := pub.Publish("t", carrying(ContextWithTx(context.Background(), tx))...); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: error %v", name, err)
		}
		if err := pub.Publish("t"); !errors.Is(err, ErrClosed) {
			t.Errorf("%s, no messages: error %v", name, err)
		}
	}
	if len(tx.statements) != 1 {
		t.Errorf("%d statements", len(tx.statements))
	}
}

func TestLostAnswerIsUnknownOnlyOutsideATransaction(t *testing.T) {
	p := newTestPublisher(t, PublisherConfig{})
	lost := errors.New("connection lost")
	err := p.WithTx(&recorder{err: lost}).Publish("t", carrying(context.Background())...)
	if !errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, lost) {
		t.Errorf("outside: %v", err)
	}
	err = p.WithTx(&recordingTx{recorder{err: lost}}).Publish("t", carrying(context.Background())...)
	if errors.Is(err, ErrUnknownOutcome) || !errors.Is(err, lost) {
		t.Errorf("inside: %v", err)
	}
	err = p.WithTx(&recorder{err: &pgconn.PgError{SeverityUnlocalized: "ERROR"}}).Publish("t", carrying(context.Background())...)
	if err == nil || errors.Is(err, ErrUnknownOutcome) {
		t.Errorf("refused: %v", err)
	}
}

// recordingTx looks like a transaction: it can commit.
type recordingTx struct{ recorder }

func (*recordingTx) Commit(context.Context) error { return nil }
