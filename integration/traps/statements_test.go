package traps

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// TestStatements asks a server that logs every statement what a reader costs it.
func TestStatements(t *testing.T) {
	s := startLogging(t)
	t.Run("a poll with nothing new is one tick", s.testIdle)
	t.Run("one tick serves every shard and consumer", s.testIdleConsumers)
	t.Run("unrelated transactions cost one look each tick", s.testUnrelated)
	t.Run("ids above the sequence are not looked for at every tick", s.testProbes)
	t.Run("one scan serves every shard", s.testSharedScan)
	t.Run("a gap costs one look-up", s.testGaps)
	t.Run("whoever stands by only tries the locks", s.testStandby)
	t.Run("a leader that reads no rows only shows that it lives", s.testLeader)
}

// logging is a server that logs every statement, and nothing but what its clients do.
type logging struct {
	*pgserver.Server

	conn  *pgx.Conn // reads the log
	marks int
}

func startLogging(t *testing.T) *logging {
	t.Helper()
	s, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf, Settings: map[string]string{
		"logging_collector": "on", "log_destination": "csvlog", "log_filename": "statements.log", "log_rotation_age": "0",
		"log_rotation_size": "0", "log_statement": "all", "autovacuum": "off",
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	conn, err := pgx.Connect(t.Context(), s.DSN())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return &logging{Server: s, conn: conn}
}

// statement is one that a client had executed.
type statement struct {
	at          time.Time
	pid         string
	transaction string // its virtual id: another one for each transaction
	application string
	text        string
}

// kinds are known by a piece of their text.
var kinds = []struct{ name, piece string }{
	{"alive", "pg_is_in_recovery(),\n\tcoalesce("},
	{"mark", "last_value"},
	{"snapshot", "SELECT pg_current_snapshot()::text"},
	{"probe", "coalesce(max(id), 0)"},
	{"lock", "pg_try_advisory_lock"},
	{"window", "AND (id > $8"},
	{"next id", "min(id)"},
	{"late xids", "WITH chunk AS"},
	{"late rows", "AS finished (xid)"},
	{"by id", "WHERE id = ANY ($1"},
	{"unpark look", "WHERE unpark"},
	{"save", `UPDATE "public"."outbox_cursors"`},
}

func (s statement) kind() string {
	for _, k := range kinds {
		if strings.Contains(s.text, k.piece) {
			return k.name
		}
	}
	return "other"
}

// during returns the statements that the library's sessions had executed in the database while f ran.
func (s *logging) during(db *outbox, f func()) []statement {
	db.Helper()
	from := s.mark(db)
	f()
	to := s.mark(db)
	name := db.Text("SELECT current_database()")
	var all []statement
	inside := false
	for _, row := range s.log(db) {
		text := row[13]
		if strings.Contains(text, from) || strings.Contains(text, to) {
			inside = strings.Contains(text, from)
			continue
		}
		_, executed, ok := strings.Cut(text, ": ")
		if !inside || row[2] != name || row[11] != "LOG" || !ok || !strings.HasPrefix(text, "execute ") && !strings.HasPrefix(text, "statement: ") {
			continue
		}
		at, err := time.Parse("2006-01-02 15:04:05.000 MST", row[0])
		if err != nil {
			db.Fatal(err)
		}
		if application := row[22]; application != "" { // the test's own pool has no name
			all = append(all, statement{at: at, pid: row[3], transaction: row[9], application: application, text: executed})
		}
	}
	return all
}

// mark leaves a line in the log and waits until it is there, with all that was logged before.
func (s *logging) mark(db *outbox) string {
	db.Helper()
	s.marks++
	mark := fmt.Sprintf("mark %d of the test", s.marks)
	if _, err := s.conn.Exec(db.Context(), "SELECT '"+mark+"'", pgx.QueryExecModeSimpleProtocol); err != nil {
		db.Fatal(err)
	}
	late := time.After(outboxtest.Patience)
	for !slices.ContainsFunc(s.log(db), func(row []string) bool { return strings.Contains(row[13], mark) }) {
		select {
		case <-time.After(20 * time.Millisecond):
		case <-late:
			db.Fatal("the server does not write its log")
		}
	}
	return mark
}

func (s *logging) log(db *outbox) (rows [][]string) {
	db.Helper()
	var text string
	err := s.conn.QueryRow(db.Context(), "SELECT pg_read_file(pg_current_logfile('csvlog'))").Scan(&text)
	if err != nil {
		db.Fatal(err)
	}
	r := csv.NewReader(strings.NewReader(text))
	r.FieldsPerRecord = -1
	for {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			return rows
		}
		if err != nil {
			return rows // the last line is still being written
		}
		if len(row) > 22 {
			rows = append(rows, row)
		}
	}
}

func count(all []statement) map[string]int {
	out := map[string]int{}
	for _, s := range all {
		out[s.kind()]++
	}
	return out
}

func (s *logging) outbox(t *testing.T) (db *outbox) {
	t.Helper()
	return migrated(t, s.Database(t))
}

func (db *outbox) receiveNamed(cfg pgoutbox.SubscriberConfig) *receiver {
	db.Helper()
	pool, _ := db.newPool()
	return db.receive(pool, cfg, nil)
}

const idlePoll = 40 * time.Millisecond

func idleConfig(shards int) pgoutbox.SubscriberConfig {
	return pgoutbox.SubscriberConfig{ConsumerGroup: "test", Shards: shards, PollInterval: idlePoll, RetryInterval: 50 * time.Millisecond}
}

// led waits until every shard is led.
func (db *outbox) led() {
	db.Helper()
	db.Eventually("every shard is led", "SELECT bool_and(term > 0) FROM outbox_cursors")
}

// ticks waits until the lock session has ticked n times more, going by the session's own start of statements.
func (db *outbox) ticks(n int) {
	db.Helper()
	for range n {
		last := db.Text("SELECT coalesce(max(query_start)::text, '') FROM pg_stat_activity WHERE " + outboxtest.IsLockSession)
		db.Eventually("the next tick", "SELECT max(query_start)::text <> $1 FROM pg_stat_activity WHERE "+outboxtest.IsLockSession, last)
	}
}

// isTicks fails unless the statements are whole ticks of one session and nothing else, in the order that matters: life first,
// then mark, snapshot, mark, each a transaction of its own.
func isTicks(t *testing.T, all []statement) {
	t.Helper()
	order := []string{"alive", "mark", "snapshot", "mark"}
	at, probes, looks := -1, 0, 0
	transactions := map[string]bool{}
	for _, s := range all {
		if s.pid != all[0].pid || !strings.HasPrefix(s.application, "pgoutbox ") {
			t.Fatalf("%s runs %s", s.application, s.text)
		}
		if transactions[s.transaction] {
			t.Errorf("%q shares its transaction", s.kind())
		}
		transactions[s.transaction] = true
		kind := s.kind()
		if kind == "probe" && (at == -1 || at == 3) {
			probes++
			continue
		}
		if kind == "unpark look" && (at == -1 || at == 3) {
			looks++
			continue
		}
		if at == -1 { // where the recording began
			at = slices.Index(order, kind)
			if kind == "mark" {
				at = -1
				continue
			}
		} else {
			at = (at + 1) % len(order)
		}
		if at == -1 || order[at] != kind {
			t.Fatalf("%q came where %q belongs; a tick is %q: %s", kind, order[max(at, 0)], order, s.text)
		}
	}
	elapsed := all[len(all)-1].at.Sub(all[0].at)
	if most := 1 + int(elapsed/(10*time.Second)); probes > most {
		t.Errorf("%d looks for ids above the sequence in %v", probes, elapsed)
	}
	if most := 1 + int(elapsed/time.Second); looks > most {
		t.Errorf("%d looks for parked rows in %v", looks, elapsed)
	}
	if n, most := count(all)["alive"], int(elapsed/idlePoll)+2; n > most {
		t.Errorf("%d ticks in %v, at a poll interval of %v", n, elapsed, idlePoll)
	}
}

// areTicks fails unless what a session runs of ticks, from its very first statement on, are whole ones that ask for life
// first: a snapshot that is taken while a promotion is under way hides prepared transactions.
func areTicks(t *testing.T, all []statement) {
	t.Helper()
	order := []string{"alive", "mark", "snapshot", "mark"}
	at := 0
	for _, s := range all {
		switch kind := s.kind(); {
		case kind == "probe" && at == 0: // after a whole tick
		case slices.Contains(order, kind) || kind == "probe":
			if kind != order[at] {
				t.Fatalf("%q came where %q belongs", kind, order[at])
			}
			at = (at + 1) % len(order)
		}
	}
}

func (s *logging) testIdle(t *testing.T) {
	for _, shards := range []int{1, 16, 64} {
		db := s.outbox(t)
		r := db.receiveNamed(idleConfig(shards))
		r.settle()
		db.led()
		db.saved()
		db.ticks(3) // the save itself was a transaction to look at
		var before, after string
		all := s.during(db, func() {
			before = db.Text("SELECT pg_current_snapshot()::text")
			db.ticks(20)
			after = db.Text("SELECT pg_current_snapshot()::text")
		})
		if before != after {
			t.Errorf("%d shards: an idle reader used transaction ids: %s, then %s", shards, before, after)
		}
		if n := count(all)["alive"]; n < 15 {
			t.Fatalf("%d shards: %d ticks of 20 in the log: %v", shards, n, count(all))
		}
		isTicks(t, all)
		r.close()
	}
}

func (s *logging) testIdleConsumers(t *testing.T) {
	db := s.outbox(t)
	pool, _ := db.newPool()
	sub, err := pgoutbox.NewSubscriber(pool, idleConfig(64), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, topic := range []string{"a", "b", "c", pgoutbox.AllTopics} {
		if _, err := sub.Subscribe(t.Context(), topic); err != nil {
			t.Fatal(err)
		}
	}
	db.Eventually("four consumers lead every shard", "SELECT count(*) = 256 AND bool_and(term > 0) FROM outbox_cursors")
	db.ticks(3)
	all := s.during(db, func() { db.ticks(15) })
	isTicks(t, all)
	if err := sub.Close(); err != nil {
		t.Error(err)
	}
}

// Transactions that write no message make a batch, of which one statement finds that it is empty; they are no reason to save.
func (s *logging) testUnrelated(t *testing.T) {
	db := s.outbox(t)
	db.Exec("CREATE TABLE business (id int)")
	r := db.receiveNamed(idleConfig(16))
	r.settle()
	db.led()
	db.saved()
	all := s.during(db, func() {
		for range 15 {
			db.Exec("INSERT INTO business VALUES (1)")
			db.ticks(1)
		}
	})
	n := count(all)
	if n["late xids"] == 0 || n["late xids"] > n["alive"] {
		t.Errorf("%d looks for late rows in %d ticks", n["late xids"], n["alive"])
	}
	for _, kind := range []string{"save", "window", "next id", "late rows", "by id"} {
		if n[kind] > 0 {
			t.Errorf("%d statements of kind %q", n[kind], kind)
		}
	}
	r.close()
}

func (s *logging) testProbes(t *testing.T) {
	db := s.outbox(t)
	r := db.receiveNamed(idleConfig(1))
	all := s.during(db, func() {
		for i := range 40 {
			db.put(db.Pool, fmt.Sprintf("row %d", i))
			r.until(fmt.Sprintf("row %d", i))
		}
	})
	n, elapsed := count(all), all[len(all)-1].at.Sub(all[0].at)
	if most := 2 + int(elapsed/(10*time.Second)); n["probe"] > most || n["alive"] < 40 {
		t.Errorf("%d looks for ids above the sequence in %d ticks and %v", n["probe"], n["alive"], elapsed)
	}
	r.close()
}

func (s *logging) testSharedScan(t *testing.T) {
	const rows, page = 10_000, 1000
	db := s.outbox(t)
	db.Exec(fmt.Sprintf("INSERT INTO outbox (topic, key, uuid) SELECT 't', 'key ' || i, 'row ' || i FROM generate_series(1, %d) AS i", rows))
	var r *receiver
	all := s.during(db, func() {
		r = db.receiveNamed(idleConfig(16))
		r.until(numbered("row", rows)...)
	})
	areTicks(t, all)
	n := count(all)
	t.Logf("%d rows over 16 shards: %v", rows, n)
	if n["window"] < rows/page || n["window"] > rows/page+5 {
		t.Errorf("%d windows for %d rows, want about %d", n["window"], rows, rows/page)
	}
	if others := n["late xids"] + n["late rows"] + n["next id"] + n["by id"]; others > 5 {
		t.Errorf("%d other pages", others)
	}
	r.close()
}

func (s *logging) testGaps(t *testing.T) {
	db := s.outbox(t)
	const gaps = 3
	var want []string
	for i := range gaps + 1 {
		want = append(want, fmt.Sprintf("row %d", i))
		db.put(db.Pool, want[i])
		db.Exec("SELECT setval('outbox_id_seq', (SELECT last_value FROM outbox_id_seq) + 100000)") // as 100,000 rollbacks do
	}
	var r *receiver
	all := s.during(db, func() {
		r = db.receiveNamed(inOrder())
		r.until(want...)
	})
	n := count(all)
	if n["next id"] > gaps+1 || n["window"] > 2*(gaps+1) {
		t.Errorf("%d gaps of 100,000 ids cost %d look-ups and %d windows", gaps+1, n["next id"], n["window"])
	}
	r.exactly(want...)
	r.close()
}

func (s *logging) testStandby(t *testing.T) {
	db := s.outbox(t)
	r := db.receive(db.Pool, idleConfig(16), nil)
	db.led()
	standby, name := db.newPool()
	second := db.receive(standby, idleConfig(16), nil)
	leader := db.Text("SELECT pid FROM pg_stat_activity WHERE " + outboxtest.IsLockSession + " ORDER BY backend_start LIMIT 1")
	all := s.during(db, func() {
		db.Eventually("the standby has tried", "SELECT count(*) > 0 FROM pg_stat_activity WHERE "+outboxtest.IsLockSession+
			" AND pid <> $1::text::int AND query LIKE '%pg_try_advisory_lock%'", leader)
		db.ticks(30)
	})
	for _, s := range all {
		if s.application == name {
			t.Errorf("a standby reads: %s", s.text)
		}
	}
	second.close()
	r.close()
}

func (s *logging) testLeader(t *testing.T) {
	db := s.outbox(t)
	pool, _ := db.newPool()
	leader, err := pgoutbox.NewLeader(pool, pgoutbox.LeaderConfig{Name: "test", Shards: 4, Lease: time.Second, RetryInterval: idlePoll}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- leader.Run(ctx, func(ctx context.Context, _ pgoutbox.Lead) error {
			<-ctx.Done()
			return nil
		})
	}()
	db.Eventually("every shard is led", "SELECT count(*) = 4 AND bool_and(term > 0) FROM outbox_cursors")
	all := s.during(db, func() { db.ticks(8) })
	for _, s := range all {
		if kind := s.kind(); kind != "alive" {
			t.Errorf("an idle leader runs %s", kind)
		}
	}
	if len(all) < 4 {
		t.Errorf("%d proofs of life", len(all))
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
