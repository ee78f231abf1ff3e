package leader

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Two processes that give shards up and take them again, for many terms: never two calls of one shard at once, and each term
// is higher than all before it.
func TestOneCallAShardAtATimeAndTermsAscend(t *testing.T) {
	t.Parallel()
	const shards, calls = 4, 60
	db := newOutbox(t)
	var mu sync.Mutex
	running, last := map[int]int{}, map[int]int64{}
	total, enough := 0, make(chan struct{})
	turn := func(ctx context.Context, l pgoutbox.Lead) error {
		mu.Lock()
		if running[l.Shard]++; running[l.Shard] > 1 {
			t.Errorf("shard %d is led twice, in terms %d and %d", l.Shard, last[l.Shard], l.Term)
		}
		if l.Term <= last[l.Shard] {
			t.Errorf("term %d of shard %d came after term %d", l.Term, l.Shard, last[l.Shard])
		}
		last[l.Shard] = l.Term
		if total++; total == calls {
			close(enough)
		}
		mu.Unlock()
		_, err := l.Exec(ctx, "SELECT 1") // a round trip long
		mu.Lock()
		running[l.Shard]--
		mu.Unlock()
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the lead ended, and with it what was asked of it
		}
		return err
	}
	one := db.lead(pgoutbox.LeaderConfig{Shards: shards}, turn)
	other := db.lead(pgoutbox.LeaderConfig{Shards: shards}, turn)
	outboxtest.Next(t, "many calls", enough)
	one.Stop()
	other.Stop()
	one.Ended()
	other.Ended()
	db.MustBeClean()
	if terms := db.Text("SELECT sum(term)::bigint FROM outbox_cursors"); terms == "0" {
		t.Error("no term was counted")
	}
}

// All of a leader's shards are on one session, and each is led once.
func TestOneSessionHoldsEveryShard(t *testing.T) {
	t.Parallel()
	const shards = 256
	db := newOutbox(t)
	leads := make(chan led, 2*shards)
	db.lead(pgoutbox.LeaderConfig{Shards: shards}, untilEnd(leads))
	seen := map[int]bool{}
	for range shards {
		l := outboxtest.Next(t, "a lead", leads)
		if seen[l.Shard] || l.Term != 1 {
			t.Errorf("shard %d is led twice, in term %d now", l.Shard, l.Term)
		}
		seen[l.Shard] = true
	}
	if n := db.Text("SELECT count(*) FROM pg_stat_activity WHERE " + outboxtest.IsLockSession); n != "1" {
		t.Errorf("%s sessions", n)
	}
	if n := db.Text("SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND " + outboxtest.IsLockSession); n != "256" {
		t.Errorf("%s locks", n)
	}
}

// A leader that loses its session learns it at once, writes nothing any more, and another one takes over.
func TestLostSessionEndsTheLead(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.Exec("CREATE TABLE effects (term bigint)")
	first, second := make(chan led, 8), make(chan led, 8)
	db.lead(pgoutbox.LeaderConfig{Shards: 2, RetryInterval: time.Minute}, untilEnd(first)) // it will not be the one to take over
	old := []led{outboxtest.Next(t, "a lead", first), outboxtest.Next(t, "a lead", first)}
	db.lead(pgoutbox.LeaderConfig{Shards: 2}, untilEnd(second))
	db.Eventually("the other one stands by", "SELECT count(*) = 2 FROM pg_stat_activity WHERE "+outboxtest.IsLockSession)

	ended := time.Now()
	db.Exec("SELECT pg_terminate_backend(l.pid) FROM pg_locks AS l WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
	for _, l := range old {
		if cause := l.cause(t); !isLost(cause) {
			t.Errorf("the context of shard %d ended with %v", l.Shard, cause)
		}
	}
	if took := time.Since(ended); took > 3*time.Second {
		t.Errorf("the end of the session was noticed after %v", took)
	}
	for range old {
		l := outboxtest.Next(t, "the other one leads", second)
		if l.Term != 2 {
			t.Errorf("shard %d is led in term %d", l.Shard, l.Term)
		}
		if _, err := l.Exec(t.Context(), "INSERT INTO effects VALUES ($1)", l.Term); err != nil {
			t.Error(err)
		}
	}
	for _, l := range old {
		if _, err := l.Exec(t.Context(), "INSERT INTO effects VALUES ($1)", l.Term); !isLost(err) {
			t.Errorf("Exec of a lost lead returned %v", err)
		}
		if _, err := l.Query(t.Context(), "INSERT INTO effects VALUES ($1) RETURNING term", l.Term); !isLost(err) { //nolint:sqlclosecheck // it fails
			t.Errorf("Query of a lost lead returned %v", err)
		}
	}
	if terms := db.Text("SELECT string_agg(term::text, ' ') FROM effects"); terms != "2 2" {
		t.Errorf("effects of terms %s", terms)
	}
}

// A process that lost its session leads again by itself, in a new term.
func TestLeaderComesBack(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 8)
	db.lead(pgoutbox.LeaderConfig{Shards: 1}, untilEnd(leads))
	for term := int64(1); term <= 4; term++ {
		l := outboxtest.Next(t, "a lead", leads)
		if l.Term < term {
			t.Errorf("term %d, want %d or higher", l.Term, term)
		}
		if v, err := l.value("SELECT 42"); v != "42" || err != nil {
			t.Errorf("%s, %v", v, err)
		}
		db.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE " + outboxtest.IsLockSession)
		if cause := l.cause(t); !isLost(cause) {
			t.Errorf("the lead ended with %v", cause)
		}
	}
}

// Exec and Query run on the session that holds the lock, so that what they write is bound to it.
func TestExecAndQueryRunOnTheLockSession(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 1)
	db.lead(pgoutbox.LeaderConfig{Shards: 1}, untilEnd(leads))
	l := outboxtest.Next(t, "a lead", leads)
	pid, err := l.value("SELECT pg_backend_pid()")
	if err != nil {
		t.Fatal(err)
	}
	if holder := db.Text("SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"); holder != pid {
		t.Errorf("it runs on session %s, the lock is held by %s", pid, holder)
	}
	if channels, err := l.value("SELECT count(*) FROM pg_listening_channels()"); channels != "0" || err != nil {
		t.Errorf("the session listens on %s channels, %v", channels, err)
	}

	if _, err := l.Exec(t.Context(), "CREATE TABLE effects (id int PRIMARY KEY, at timestamptz, text text)"); err != nil {
		t.Fatal(err)
	}
	at := time.Now().Truncate(time.Microsecond)
	tag, err := l.Exec(t.Context(), "INSERT INTO effects VALUES ($1, $2, $3), ($1 + 1, NULL, NULL)", 1, at, "one")
	if err != nil || tag.RowsAffected() != 2 {
		t.Errorf("%v, %v", tag, err)
	}
	rows, err := l.Query(t.Context(), "SELECT id, at, text FROM effects ORDER BY id")
	if err != nil {
		t.Fatal(err)
	}
	type effect struct {
		ID   int
		At   *time.Time
		Text *string
	}
	effects, err := pgx.CollectRows(rows, pgx.RowToStructByPos[effect])
	if err != nil || len(effects) != 2 || !effects[0].At.Equal(at) || *effects[0].Text != "one" || effects[1].At != nil || effects[1].Text != nil {
		t.Errorf("%v, %v", effects, err)
	}

	pub, err := pgoutbox.NewPublisher(nil, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := pub.WithTx(l).Publish("t", message.NewMessage("from the leader", nil)); err != nil {
		t.Error(err)
	}
	if n := db.Text("SELECT count(*) FROM outbox WHERE uuid = 'from the leader'"); n != "1" {
		t.Errorf("%s messages were stored", n)
	}
}

// Whatever a statement of the user does wrong is the statement's affair: the lead goes on.
func TestFailedStatementDoesNotCostTheLead(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 8)
	r := db.lead(pgoutbox.LeaderConfig{Shards: 2}, untilEnd(leads))
	l := outboxtest.Next(t, "a lead", leads)
	other := outboxtest.Next(t, "the other lead", leads)
	failing := map[string]func() error{
		"division by zero": func() error {
			_, err := l.Exec(t.Context(), "SELECT 1 / $1::int", 0)
			return err
		},
		"no such table": func() error {
			_, err := l.Query(t.Context(), "SELECT * FROM nothing") //nolint:sqlclosecheck // it fails
			return err
		},
		"fails in its third row": func() error {
			_, err := l.Query(t.Context(), "SELECT 1 / (3 - i) FROM generate_series(1, 5) AS i") //nolint:sqlclosecheck // it fails
			return err
		},
		"argument of another type": func() error {
			_, err := l.Exec(t.Context(), "SELECT $1::int", "not a number")
			return err
		},
		"too few arguments": func() error {
			_, err := l.Exec(t.Context(), "SELECT $1::int, $2::int", 1)
			return err
		},
		"lasts too long": func() error {
			_, err := l.Exec(t.Context(), "SELECT pg_sleep(60)")
			return err
		},
		"its caller gives up": func() error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			_, err := l.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		},
	}
	for name, f := range failing {
		if err := f(); err == nil || isLost(err) {
			t.Errorf("%s: returned %v", name, err)
		}
		if v, err := l.value("SELECT 42"); v != "42" || err != nil {
			t.Fatalf("%s: the lead is over: %v; the log says\n%s", name, err, r.log)
		}
	}
	if l.ctx.Err() != nil || other.ctx.Err() != nil {
		t.Errorf("a lead ended: %v, %v", context.Cause(l.ctx), context.Cause(other.ctx))
	}
}

// What would take the lock's proof away, or leave the session in a transaction, ends the session, and the lead with it.
func TestStatementThatBreaksTheSessionCostsTheLead(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 8)
	db.lead(pgoutbox.LeaderConfig{Shards: 1, Lease: 2 * time.Second}, untilEnd(leads))
	for _, sql := range []string{
		"BEGIN",
		"DISCARD ALL",
		"RESET ALL",
		"SET idle_session_timeout = 0",
		"SELECT pg_terminate_backend(pg_backend_pid())",
	} {
		l := outboxtest.Next(t, "a lead", leads)
		_, _ = l.Exec(t.Context(), sql)
		if cause := l.cause(t); !isLost(cause) {
			t.Errorf("%s: the lead ended with %v", sql, cause)
		}
	}
	outboxtest.Next(t, "a lead after all that", leads)
}

// Run ends with its context: calls are awaited, may still write, and nothing is left on the server.
func TestRunEndsWithNothingLeft(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.Exec("CREATE TABLE effects (shard int)")
	started := make(chan struct{}, 8)
	release := make(chan struct{})
	r := db.lead(pgoutbox.LeaderConfig{Shards: 3}, func(ctx context.Context, l pgoutbox.Lead) error {
		started <- struct{}{}
		<-ctx.Done()
		if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) || isLost(cause) {
			t.Errorf("the call ended with %v", cause)
		}
		<-release
		_, err := l.Exec(context.WithoutCancel(ctx), "INSERT INTO effects VALUES ($1)", l.Shard)
		if err != nil {
			t.Error(err)
		}
		return err
	})
	for range 3 {
		outboxtest.Next(t, "a call", started)
	}
	r.Stop()
	if n := db.Text("SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' AND " + outboxtest.IsLockSession); n != "3" {
		t.Errorf("%s locks are held while the calls end", n)
	}
	close(release)
	r.Ended()
	db.MustBeClean()
	if n := db.Text("SELECT count(DISTINCT shard) FROM effects"); n != "3" {
		t.Errorf("%s of 3 calls wrote", n)
	}
	leads := make(chan led, 8)
	db.lead(pgoutbox.LeaderConfig{Shards: 3}, untilEnd(leads))
	for range 3 {
		outboxtest.Next(t, "a lead of the next process", leads)
	}
}

// Run returns when its context ends, also when nothing is led and nothing can be reached.
func TestRunEndsWithoutALead(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 1)
	db.lead(pgoutbox.LeaderConfig{Shards: 1}, untilEnd(leads))
	outboxtest.Next(t, "a lead", leads)
	standby := db.lead(pgoutbox.LeaderConfig{}, func(context.Context, pgoutbox.Lead) error {
		t.Error("the shard is led twice")
		return nil
	})
	db.Eventually("it stands by", "SELECT count(*) = 2 FROM pg_stat_activity WHERE "+outboxtest.IsLockSession)
	standby.Stop()
	standby.Ended()

	nowhere := pgserver.Pool(t, "postgres://127.0.0.1:1/nothing?sslmode=disable")
	r := db.leadOn(nowhere, pgoutbox.LeaderConfig{}, untilEnd(leads))
	r.log.Until(t, "the lock session ended")
	r.Stop()
	r.Ended()
}

func TestFailedWorkIsLoggedAndStartedAgain(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	terms := make(chan int64, 100)
	r := db.lead(pgoutbox.LeaderConfig{Shards: 1}, func(ctx context.Context, l pgoutbox.Lead) error {
		select {
		case terms <- l.Term:
		case <-ctx.Done():
		}
		if l.Term < 3 {
			return errors.New("the work is not done")
		}
		return nil
	})
	for want := int64(1); want <= 4; want++ { // the third and fourth returned nil
		if term := outboxtest.Next(t, "another call", terms); term != want {
			t.Errorf("term %d, want %d", term, want)
		}
	}
	r.log.Until(t, "error", "the work is not done", "shard:0")
}

func TestOnlyShardsAreLed(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 8)
	db.lead(pgoutbox.LeaderConfig{Shards: 4, OnlyShards: []int{1, 3}}, untilEnd(leads))
	rest := make(chan led, 8)
	shards := []int{outboxtest.Next(t, "a lead", leads).Shard, outboxtest.Next(t, "a lead", leads).Shard}
	db.lead(pgoutbox.LeaderConfig{}, untilEnd(rest))
	others := []int{outboxtest.Next(t, "a lead", rest).Shard, outboxtest.Next(t, "a lead", rest).Shard}
	slices.Sort(shards)
	slices.Sort(others)
	if !slices.Equal(shards, []int{1, 3}) || !slices.Equal(others, []int{0, 2}) {
		t.Errorf("shards %v are led, the other process leads %v", shards, others)
	}
	wrong, err := pgoutbox.NewLeader(db.Pool, pgoutbox.LeaderConfig{Name: "test", OnlyShards: []int{4}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := wrong.Run(t.Context(), untilEnd(leads)); err == nil {
		t.Error("a shard that does not exist was accepted")
	}
}

func TestNumberOfShardsIsFixed(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	leads := make(chan led, 32)
	r := db.lead(pgoutbox.LeaderConfig{}, untilEnd(leads))
	for range 16 {
		outboxtest.Next(t, "one of the 16 shards of a new name", leads)
	}
	r.Stop()
	r.Ended()
	wrong, err := pgoutbox.NewLeader(db.Pool, pgoutbox.LeaderConfig{Name: "test", Shards: 8}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := wrong.Run(t.Context(), untilEnd(leads)); err == nil {
		t.Error("another number of shards was accepted")
	}
	db.MustBeClean()
}

func TestZeroLeadIsRefused(t *testing.T) {
	t.Parallel()
	if _, err := (pgoutbox.Lead{}).Exec(t.Context(), "SELECT 1"); err == nil {
		t.Error("Exec of no lead returned nil")
	}
	if _, err := (pgoutbox.Lead{}).Query(t.Context(), "SELECT 1"); err == nil { //nolint:sqlclosecheck // it fails
		t.Error("Query of no lead returned nil")
	}
}

// Calls of many shards share the session, side by side.
func TestShardsShareTheSession(t *testing.T) {
	t.Parallel()
	const shards, rows = 8, 25
	db := newOutbox(t)
	db.Exec("CREATE TABLE effects (shard int, n int)")
	done := make(chan error, shards)
	db.lead(pgoutbox.LeaderConfig{Shards: shards}, func(ctx context.Context, l pgoutbox.Lead) error {
		for n := range rows {
			if _, err := l.Exec(ctx, "INSERT INTO effects VALUES ($1, $2)", l.Shard, n); err != nil {
				done <- err
				return err
			}
		}
		done <- nil
		<-ctx.Done()
		return nil
	})
	for range shards {
		if err := outboxtest.Next(t, "a shard's work is done", done); err != nil {
			t.Error(err)
		}
	}
	if n := db.Text("SELECT count(DISTINCT (shard, n)) || ' of ' || count(*) FROM effects"); n != "200 of 200" {
		t.Errorf("%s effects", n)
	}
}
