package cases_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// FC-27: a group is created while a transaction is open. Its start must not leave that transaction's rows out, and nothing but
// its creation may set it.
func TestFC27_StartOfANewGroup(t *testing.T) {
	t.Parallel()
	ob := newOutbox(t)
	var history []string
	for n := range 100 {
		history = append(history, fmt.Sprintf("m%d", n+1))
		ob.put(t, fmt.Sprintf("key %d", n%5), history[n])
	}
	a := ob.begin(t)
	must(t, a.publish("key 1", "m101"))
	creation := outboxtest.Ask[time.Time](ob.Outbox, "SELECT clock_timestamp()")

	groups := map[string]pgoutbox.StartPosition{
		"default": {}, "earliest": pgoutbox.Earliest, "latest": pgoutbox.Latest, "at": pgoutbox.StartAt(creation),
	}
	group := func(name string, from pgoutbox.StartPosition) config {
		return func(c *pgoutbox.SubscriberConfig) { c.ConsumerGroup, c.StartFrom = name, from }
	}
	for name, from := range groups {
		r := ob.reader(t, group(name, from))
		must(t, r.sub.SubscribeInitialize(outboxtest.Topic))
		r.close(t)
	}
	must(t, a.Commit(t.Context()))
	ob.put(t, "key 2", "m102")

	young := []string{"m101", "m102"}
	want := map[string][]string{
		"default": slices.Concat(history, young), "earliest": slices.Concat(history, young), "latest": young, "at": young,
	}
	for name, from := range groups {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSink()
			other := pgoutbox.Latest // asks for another start than the one the group was created with
			if from == pgoutbox.Latest {
				other = pgoutbox.Earliest
			}
			for _, again := range []string{"first start", "second start"} {
				r := ob.read(t, again, s, ackAll, group(name, other))
				ob.put(t, "", name+again)
				s.await(t, 10*time.Second, name+again)
				s.await(t, 10*time.Second, want[name]...)
				r.close(t)
			}
			// What the other groups' turns published is theirs, too, if they are read later.
			got := slices.DeleteFunc(s.All(), func(d delivery) bool { return d.UUID[0] != 'm' })
			if len(got) != len(want[name]) {
				t.Errorf("group %s got %d of the messages, want %d: %s", name, len(got), len(want[name]), describe(got[:min(len(got), 10)]))
			}
			s.mustHaveComeOnce(t)
			ob.MustNotGoBack()
		})
	}
}

// Two processes that create one group at once agree on one of the two starts.
func TestFC27_GroupCreatedTwiceAtOnceHasOneStart(t *testing.T) {
	t.Parallel()
	ob := newOutbox(t)
	ob.put(t, "", "history")
	for n := range outboxtest.Rounds(50) {
		s := newSink()
		group := fmt.Sprintf("group %d", n)
		var both [2]*reader
		for i, from := range []pgoutbox.StartPosition{pgoutbox.Earliest, pgoutbox.Latest} {
			both[i] = newReader(t, ob.Pool, func(c *pgoutbox.SubscriberConfig) { c.ConsumerGroup, c.StartFrom, c.Shards = group, from, 2 })
		}
		var creating errgroup.Group
		for _, r := range both {
			creating.Go(func() error { return r.sub.SubscribeInitialize(outboxtest.Topic) })
		}
		must(t, creating.Wait())
		of := "FROM outbox_consumers JOIN outbox_cursors ON consumer_id = id WHERE group_name = $1"
		made := outboxtest.Ask[string](ob.Outbox, `SELECT count(DISTINCT consumer_id) || ' consumer, ' || count(*) || ' cursors, ' ||
			count(DISTINCT after_snapshot::text) || ' start' `+of, group)
		if made != "1 consumer, 2 cursors, 1 start" {
			t.Fatalf("%s has %s", group, made)
		}
		earliest := outboxtest.Ask[bool](ob.Outbox, "SELECT bool_and(after_low = 0) "+of, group)
		both[0].subscribe(t, "P1", s, ackAll)
		both[1].subscribe(t, "P2", s, ackAll)
		ob.AwaitLocks(2)
		probe := fmt.Sprintf("probe %s", group)
		ob.put(t, "", probe)
		s.await(t, 10*time.Second, probe)
		both[0].close(t)
		both[1].close(t)
		if came := len(s.of("history")) == 1; came != earliest {
			t.Errorf("%s starts at the beginning: %t, and its history came: %t", group, earliest, came)
		}
		s.mustHaveComeOnce(t)
		s.mustHaveOneOwner(t)
	}
}
