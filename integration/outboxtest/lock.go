package outboxtest

import (
	"fmt"
	"time"
)

// Conditions on the rows of pg_stat_activity and pg_locks: what is the library's in this database.
const (
	IsLockSession  = "datname = current_database() AND application_name LIKE 'pgoutbox %'"
	IsAdvisoryLock = "locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)

// Locks lists the advisory locks that are held, once for each session.
func (o *Outbox) Locks() []string {
	o.Helper()
	return Ask[[]string](o, "SELECT coalesce(array_agg(classid || '/' || objid ORDER BY classid, objid), '{}') FROM pg_locks WHERE "+IsAdvisoryLock)
}

// LockSessions are the process ids of the sessions that hold advisory locks.
func (o *Outbox) LockSessions() []int32 {
	o.Helper()
	return Ask[[]int32](o, "SELECT coalesce(array_agg(DISTINCT pid), '{}') FROM pg_locks WHERE "+IsAdvisoryLock)
}

// AwaitLocks waits until so many advisory locks are held, and returns when they were.
func (o *Outbox) AwaitLocks(n int) time.Time {
	o.Helper()
	Eventually(o, Patience, fmt.Sprintf("%d advisory locks are held", n), func() (bool, string) {
		locks := o.Locks()
		return len(locks) == n, fmt.Sprint(locks)
	})
	return time.Now()
}

// AwaitSessions waits until there are so many lock sessions.
func (o *Outbox) AwaitSessions(n int) {
	o.Helper()
	Eventually(o, Patience, fmt.Sprintf("%d lock sessions", n), func() (bool, string) {
		is := Ask[int](o, "SELECT count(*) FROM pg_stat_activity WHERE "+IsLockSession)
		return is == n, fmt.Sprint(is)
	})
}

// MustBeClean waits until no session and no advisory lock of the library is left: the server may need a moment to notice that a
// socket was closed.
func (o *Outbox) MustBeClean() {
	o.Helper()
	o.AwaitSessions(0)
	o.AwaitLocks(0)
}

// EndLockSessions is what a crash of the readers' sessions looks like to them. It returns how many there were.
func (o *Outbox) EndLockSessions() int {
	o.Helper()
	return Ask[int](o, "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE "+IsLockSession)
}
