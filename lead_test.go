package pgoutbox

import (
	"math"
	"strings"
	"testing"
	"time"
	"unsafe"
)

// clockReading is a time.Time as time.Now returns it at a wall-clock time and at a monotonic time that need not agree: the
// clock was set, or the machine slept. Nothing exported makes one, so it is put together as the time package does.
func clockReading(wall time.Time, monotonic time.Duration) time.Time {
	t := time.Now()
	parts := (*struct {
		wall uint64
		ext  int64
		loc  *time.Location
	})(unsafe.Pointer(&t))
	const from1885 = 59453308800 - 62135596800 // seconds from 1970 back to 1885
	parts.wall = 1<<63 | uint64(wall.Unix()-from1885)<<30 | uint64(wall.Nanosecond())
	parts.ext = int64(monotonic)
	return t
}

func TestTrustEndsByWhicheverClockSaysSoFirst(t *testing.T) {
	const lease, margin = 10 * time.Second, time.Second
	start := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	tests := []struct {
		name            string
		wall, monotonic time.Duration // passed since the poll was sent
		trusted         bool
	}{
		{"at once", 0, 0, true},
		{"just in time", 9*time.Second - 1, 9*time.Second - 1, true},
		{"too late", 9 * time.Second, 9 * time.Second, false},
		{"long after", time.Hour, time.Hour, false},
		{"the machine slept, the monotonic clock stood still", time.Minute, time.Millisecond, false},
		{"the wall clock was set forward", 24 * time.Hour, time.Second, false},
		{"the wall clock was set back", -24 * time.Hour, time.Second, true},
		{"the wall clock was set back, and time is up", -24 * time.Hour, 9 * time.Second, false},
		{"the wall clock stands", 0, 9 * time.Second, false},
		{"the wall clock runs a little fast", 9 * time.Second, 8 * time.Second, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			sent, now := clockReading(start, time.Hour), clockReading(start.Add(tt.wall), time.Hour+tt.monotonic)
			if now.Sub(sent) != tt.monotonic || now.Round(0).Sub(sent.Round(0)) != tt.wall {
				t.Fatalf("the time package has changed: clockReading passes %v, %v", now.Sub(sent), now.Round(0).Sub(sent.Round(0)))
			}
			if got := trusts(sent, now, lease, margin); got != tt.trusted {
				t.Errorf("trusted: %v", got)
			}
		})
	}
	if now := time.Now(); trusts(now, now, time.Second, time.Second) || trusts(now, now, time.Second, time.Minute) {
		t.Error("a margin as long as the lease leaves time to act")
	}
}

func TestLimitsFollowTheLease(t *testing.T) {
	tests := []struct {
		lease, statement, lockWait, margin, keepAlive time.Duration
	}{
		{time.Second, 2 * time.Second, 125 * time.Millisecond, 200 * time.Millisecond, 250 * time.Millisecond},
		{2 * time.Second, 2 * time.Second, 250 * time.Millisecond, 200 * time.Millisecond, 500 * time.Millisecond},
		{10 * time.Second, 2500 * time.Millisecond, time.Second, time.Second, 2500 * time.Millisecond},
		{time.Minute, 15 * time.Second, time.Second, 6 * time.Second, 15 * time.Second},
	}
	for _, tt := range tests {
		t.Run(tt.lease.String(), func(t *testing.T) {
			l := limits{lease: tt.lease}
			for name, pair := range map[string][2]time.Duration{
				"statement": {l.statement(), tt.statement}, "lockWait": {l.lockWait(), tt.lockWait},
				"margin": {l.margin(), tt.margin}, "keepAlive": {l.keepAlive(), tt.keepAlive},
			} {
				if pair[0] != pair[1] {
					t.Errorf("%s is %s, want %s", name, pair[0], pair[1])
				}
			}
			// A poll that waits for somebody's lock on a table, gives up and is followed by another is still in time.
			if l.keepAlive()+l.lockWait() >= l.lease-l.margin() {
				t.Errorf("a poll that is given up after %s leaves no time", l.lockWait())
			}
		})
	}
}

// TestLockKeyNeverChanges holds the numbers that processes of different versions must agree on. They were computed apart from
// this code: the first 8 bytes, big-endian, of the sha256 of the five parts, each after its length in 4 bytes; numbers are 8
// bytes.
func TestLockKeyNeverChanges(t *testing.T) {
	tests := []struct {
		name          string
		base          int64
		schema, table string
		consumer      int64
		shard         int
		want          int64
	}{
		{"the defaults", 0, "public", "outbox", 1, 0, -5336175098128876177},
		{"the last shard", 0, "public", "outbox", 1, 255, -4642898776793330628},
		{"another consumer", 0, "public", "outbox", 2, 0, 1815005315209040633},
		{"a base", 42, "public", "outbox", 1, 0, 6412685348197344356},
		{"the lowest base", math.MinInt64, "public", "outbox", 1, 0, 4361611309040932058},
		{"large numbers", math.MaxInt64, "public", "outbox", math.MaxInt64, 255, 2426948417471571515},
		{"empty names", 0, "", "", 0, 0, -4791202449292476288},
		{"names beyond ASCII", 0, "schéma", "таблица", 3, 7, 2354299204757819138},
		{"quotes and dots", 0, `a"."b`, "c.d", 3, 7, 2174621343831717501},
		{"a split", 0, "a", "bc", 1, 0, -2592627789690740078},
		{"the same split elsewhere", 0, "ab", "c", 1, 0, 951125579970659578},
		{"a name of a megabyte", 0, strings.Repeat("s", 1<<20), "t", 1, 0, 730074358150426787},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := lockKey(tt.base, names{schema: tt.schema, table: tt.table}, tt.consumer, tt.shard); got != tt.want {
				t.Errorf("the key is %d, another version takes %d", got, tt.want)
			}
		})
	}
}

func TestFC31LockKeysNeverMeet(t *testing.T) {
	seen := make(map[int64]struct{}, 250_000)
	add := func(base int64, n names, consumer int64, shard int) {
		key := lockKey(base, n, consumer, shard)
		if _, taken := seen[key]; taken {
			t.Fatalf("base %d, %q.%q, consumer %d, shard %d: key %d is taken", base, n.schema, n.table, consumer, shard, key)
		}
		seen[key] = struct{}{}
	}
	// What base + number, or names put together without their lengths, would confuse.
	tricky := []names{
		{"a", "bc"}, {"ab", "c"}, {"a.b", "c"}, {"a", "b.c"}, {`a"."b`, "c"}, {"a", `b"."c`}, {"", "abc"}, {"abc", ""}, {"", ""},
		{"public", "outbox"}, {"publicoutbox", ""}, {"public", "outbox1"}, {"public1", "outbox"}, {"Public", "outbox"}, {"é", "e"}, {"e", "é"},
		{"a\x00", "b"}, {"a", "\x00b"}, {strings.Repeat("s", 63), "t"}, {"s", strings.Repeat("t", 63)},
	}
	for _, n := range tricky {
		for _, base := range []int64{0, 1, -1, 256, 1 << 32, -1 << 63} {
			for consumer := range int64(20) {
				for _, shard := range []int{0, 1, 2, 10, 11, 19, 255} {
					add(base, n, consumer, shard)
				}
			}
		}
	}
	for consumer := range int64(730) {
		for shard := range 256 {
			add(7, names{"public", "outbox"}, 1<<40-consumer, shard)
		}
	}
	if len(seen) < 200_000 {
		t.Errorf("only %d tuples", len(seen))
	}
}
