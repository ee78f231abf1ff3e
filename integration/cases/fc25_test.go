package cases_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// policies are what can be done about a message that the broker never takes.
var policies = []struct {
	name    string
	mod     config
	parked  []string // of m0 to m9, when the broker refuses m5
	passing bool     // the rest of the key comes meanwhile
}{
	{"block", func(*pgoutbox.SubscriberConfig) {}, nil, false},
	{"park the row", func(c *pgoutbox.SubscriberConfig) { c.MaxAttempts = 3 }, []string{"m 5"}, true},
	{"park the row, one shard in order", func(c *pgoutbox.SubscriberConfig) {
		c.MaxAttempts, c.Ordering = 3, pgoutbox.OrderByShard
	}, []string{"m 5"}, true},
	{"park the key", func(c *pgoutbox.SubscriberConfig) {
		c.MaxAttempts, c.ParkPolicy = 3, pgoutbox.ParkKey
	}, []string{"m 5", "m 6", "m 7", "m 8", "m 9"}, false},
}

// FC-25: the broker refuses m5 for ever. What is to happen then happens: it blocks its key, and that is loud, or it is parked, after
// as many attempts as were asked for. Writing that down fails at first; nothing passes it by until it is written. All else is
// delivered meanwhile, and when the broker has been mended, everything is.
func TestFC25_RefusedMessageFollowsThePolicy(t *testing.T) {
	t.Parallel()
	for _, p := range policies {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			ob, s := newOutbox(t), newSink()
			ob.parkingFails()
			var mended atomic.Bool
			handle := func(_ context.Context, d delivery) error {
				if d.UUID == "m 5" && !mended.Load() {
					return errors.New("never")
				}
				return nil
			}
			r := ob.read(t, "reader", s, handle, p.mod, func(c *pgoutbox.SubscriberConfig) {
				c.Shards, c.NackDelay, c.StalledAfter = 4, 10*time.Millisecond, time.Second
			})
			ob.put(t, "key", numbered("m", 10)...)
			if len(p.parked) > 0 {
				ob.mustNotPassUnparked(t)
			} else {
				s.awaitTimes(t, 10*time.Second, "m 5", 6)
				mustBackOff(t, s.of("m 5"))
				outboxtest.Eventually(t, 10*time.Second, "the reader is not healthy and says which row is stuck", func() (bool, string) {
					err := r.sub.Healthy(t.Context())
					return err != nil && strings.Contains(err.Error(), fmt.Sprint(ob.ID("m 5"))), fmt.Sprint(err)
				})
			}
			for n := range 8 { // in every shard
				ob.put(t, fmt.Sprintf("other %d", n), fmt.Sprintf("other %d", n))
			}
			s.await(t, 10*time.Second, numbered("other", 8)...)
			if p.passing {
				s.await(t, 10*time.Second, numbered("m", 10)...)
			}
			parked := ob.parked(len(p.parked))
			if !slices.Equal(parked, p.parked) {
				t.Errorf("parked are %q, want %q", parked, p.parked)
			}
			if len(p.parked) > 0 {
				if n := len(s.of("m 5")); n != 3 {
					t.Errorf("m 5 was delivered %d times, not 3", n)
				}
				if got := ob.Text("SELECT string_agg(attempts::text, ' ' ORDER BY row_id) FROM outbox_parked"); !strings.HasPrefix(got, "3") {
					t.Errorf("the attempts are %s", got)
				}
			}
			if n := len(s.of("m 6")); n > 0 != p.passing {
				t.Errorf("m 6 was delivered %d times", n)
			}
			mended.Store(true)
			ob.Exec("UPDATE outbox_parked SET unpark = true")
			ob.put(t, "key", "m 10")
			ob.judge(t, s)
			outboxtest.Eventually(t, 5*time.Second, "m 5 has come and nothing is parked", func() (bool, string) {
				last := s.of("m 5")
				left := ob.Text("SELECT count(*) FROM outbox_parked")
				return len(last) > len(p.parked[:min(1, len(p.parked))])*3 && left == "0", left
			})
			times := map[string]int{"m 5": 4}
			if len(p.parked) == 0 {
				times["m 5"] = len(s.of("m 5"))
			}
			s.mustHaveCome(t, times)
			if !p.passing {
				s.mustKeepOrder(t)
			}
			outboxtest.Eventually(t, 5*time.Second, "the reader is healthy", func() (bool, string) {
				err := r.sub.Healthy(t.Context())
				return err == nil, fmt.Sprint(err)
			})
			r.close(t)
		})
	}
}

// parkingFails has the first two statements that park a row fail.
func (ob *outbox) parkingFails() {
	ob.Exec(`CREATE SEQUENCE parkings;
		CREATE FUNCTION parking_fails() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('parkings') <= 2 THEN RAISE EXCEPTION 'no space left'; END IF;
			RETURN new;
		END $$;
		CREATE TRIGGER parking_fails BEFORE INSERT ON outbox_parked FOR EACH ROW EXECUTE FUNCTION parking_fails()`)
}

// mustNotPassUnparked demands that m5 lies before the stored position only when it is among the pending ones or the parked ones.
func (ob *outbox) mustNotPassUnparked(t *testing.T) {
	t.Helper()
	id := ob.ID("m 5")
	const both = `SELECT (SELECT count(*) FROM outbox_parked WHERE row_id = $1),
		(SELECT last_value FROM parkings), (SELECT bool_or($1 = ANY (pending)) FROM outbox_cursors),
		(SELECT bool_or(pg_visible_in_snapshot(o.xid, after_snapshot) OR (pg_visible_in_snapshot(o.xid, upto_snapshot) AND last_id >= o.id))
			FROM outbox_cursors JOIN outbox AS o ON o.id = $1 AND shard = o.slot % 4)`
	outboxtest.Eventually(t, 15*time.Second, "m 5 is parked after two failures", func() (bool, string) {
		var parked, tries int
		var pending, passed *bool
		must(t, ob.Pool.QueryRow(t.Context(), both, id).Scan(&parked, &tries, &pending, &passed))
		if is(passed) && !is(pending) && parked == 0 {
			t.Fatalf("m 5 is passed, not pending and not parked (try %d)", tries)
		}
		return parked == 1 && tries > 2, fmt.Sprint(parked, tries, is(pending), is(passed))
	})
}

func is(b *bool) bool { return b != nil && *b }

// parked waits for so many and returns which they are.
func (ob *outbox) parked(n int) []string {
	ob.Eventually("the rows are parked", "SELECT count(*) = $1 FROM outbox_parked", n)
	return outboxtest.Ask[[]string](ob.Outbox, "SELECT array_agg(uuid ORDER BY id) FROM outbox_parked JOIN outbox ON id = row_id")
}

// mustBackOff demands that each attempt waited longer than the one before, but for the first.
func mustBackOff(t *testing.T, log []delivery) {
	t.Helper()
	first, last := log[1].At.Sub(log[0].At), log[5].At.Sub(log[4].At)
	if last < 3*first/2 || last < 50*time.Millisecond {
		t.Errorf("the second attempt came after %v, the sixth after %v", first, last)
	}
	for i, d := range log {
		if d.Row.Attempt != i+1 {
			t.Errorf("attempt %d is counted as %d", i+1, d.Row.Attempt)
		}
	}
}
