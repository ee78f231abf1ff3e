package cases_test

import (
	"fmt"
	"testing"
	"time"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-67: no clock and no time zone decides what is delivered. Where they are asked for, by StartAt, the server's instants count; what
// handlers see is UTC.
func TestFC67_TimeZonesChangeNothing(t *testing.T) {
	t.Parallel()
	ob, s := newOutbox(t), newSink()
	ob.Exec("ALTER DATABASE " + ob.Text("SELECT quote_ident(current_database())") + " SET TimeZone = 'Asia/Kolkata'")
	ob.Pool.Reset()
	if zone := ob.Text("SHOW TimeZone"); zone != "Asia/Kolkata" {
		t.Fatalf("the trap is none: the time zone is %s", zone)
	}
	ob.put(t, "", numbered("old", 5)...)
	ob.Exec("UPDATE outbox SET created_at = now() - interval '90 minutes'")
	ob.put(t, "", numbered("new", 5)...)
	limit := outboxtest.Ask[time.Time](ob.Outbox, "SELECT now() - interval '1 hour'")
	for i, start := range []time.Time{limit.UTC(), limit.In(time.FixedZone("far east", 14*3600)), limit.In(time.FixedZone("far west", -11*3600))} {
		s := newSink()
		r := ob.read(t, "reader", s, ackAll, func(c *pgoutbox.SubscriberConfig) {
			c.ConsumerGroup, c.StartFrom = fmt.Sprintf("group %d", i), pgoutbox.StartAt(start)
		})
		s.await(t, 5*time.Second, numbered("new", 5)...)
		ob.probe(t, s, 5*time.Second)
		if n := len(s.of("old 0")); n > 0 {
			t.Errorf("a start at %v delivers what is older", start)
		}
		r.close(t)
	}
	// A clock that goes wrong: rows of the past and of the future are rows.
	r := ob.read(t, "reader", s, ackAll)
	for i, age := range []string{"1 hour", "-1 hour", "-100 years", "infinity"} {
		uuid := fmt.Sprintf("clock %d", i)
		w := ob.begin(t)
		must(t, w.publish("", uuid))
		ob.ExecOn(w, `UPDATE outbox SET created_at = CASE $1 WHEN 'infinity' THEN 'infinity'::timestamptz
			ELSE now() - nullif($1, 'infinity')::interval END WHERE uuid = $2`, age, uuid)
		must(t, w.Commit(t.Context()))
		d := s.await(t, 5*time.Second, uuid)
		if zone := d.Row.CreatedAt.Location(); zone != time.UTC {
			t.Errorf("the time of %s is in %s", uuid, zone)
		}
		if age == "1 hour" {
			if wrong := time.Since(d.Row.CreatedAt) - time.Hour; wrong < -time.Minute || wrong > time.Minute {
				t.Errorf("the time of %s is %v wrong", uuid, wrong)
			}
		}
	}
	ob.judge(t, s)
	r.close(t)
}
