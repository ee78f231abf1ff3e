package torture

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

// plan is one transaction, drawn before it starts: which keys it locks and how, how its messages get into the outbox,
// how it ends, and where it dawdles.
type plan struct {
	early bool     // a write elsewhere comes first, so the transaction id is drawn before the key's lock is held
	lock  lock     // how the keys are locked
	late  bool     // with forUpdate: the version is written after the outbox, not before
	keys  []string // one for each message, ascending; "" has no key
	put   put      // how the messages get into the outbox
	nest  nest     // what the savepoint around it does
	end   end

	afterEarly, afterLock, afterPut time.Duration // dawdling
	preparedFor                     time.Duration // with prepare: until another session ends it
}

type lock int

const (
	forUpdate       lock = iota // SELECT … FOR UPDATE
	updateReturning             // UPDATE … RETURNING
	onConflict                  // INSERT … ON CONFLICT DO UPDATE
	locks
)

func (l lock) String() string { return [...]string{"for update", "update returning", "on conflict"}[l] }

type put int

const (
	putInsert    put = iota // one INSERT a message
	putRows                 // one INSERT for all
	putFunction             // outbox_publish
	putCopy                 // COPY
	putCaught               // a plpgsql exception block
	putTrigger              // a deferred constraint trigger, at commit
	putPublisher            // Publisher.Publish
	puts
)

func (p put) String() string {
	return [...]string{"insert", "rows", "function", "copy", "exception block", "deferred trigger", "publisher"}[p]
}

type nest int

const (
	flat       nest = iota
	released        // the messages are written in a savepoint that is released
	rolledBack      // the same messages are written before, in a savepoint that is rolled back
	nests
)

func (n nest) String() string {
	return [...]string{"flat", "savepoint released", "savepoint rolled back"}[n]
}

type end int

const (
	commit end = iota
	rollback
	prepareCommit   // PREPARE TRANSACTION, then another session commits
	prepareRollback // PREPARE TRANSACTION, then another session rolls back
	ends
)

func (e end) String() string {
	return [...]string{"commit", "rollback", "prepared, committed", "prepared, rolled back"}[e]
}

const (
	hotKeys  = 2  // share three tenths of the transactions: many writers a key
	coldKeys = 48 // share the rest
)

// drawPlan draws a transaction. 5 % of all transactions roll back.
func drawPlan(rnd *rand.Rand) plan {
	p := plan{
		early: chance(rnd, 50),
		lock:  lock(rnd.IntN(int(locks))),
		late:  chance(rnd, 50),
		put:   put(rnd.IntN(int(puts))),
		keys:  drawKeys(rnd),
	}
	switch n := rnd.IntN(100); {
	case n < 5:
		p.end = rollback
	case n < 11:
		p.end = prepareCommit
		p.preparedFor = between(rnd, 20*time.Millisecond, 200*time.Millisecond)
		if chance(rnd, 5) {
			p.end = prepareRollback
		}
	}
	switch n := rnd.IntN(100); {
	case n < 15:
		p.nest = rolledBack
	case n < 30:
		p.nest = released
	}
	if chance(rnd, 40) {
		p.afterEarly = between(rnd, 0, 20*time.Millisecond)
	}
	if chance(rnd, 20) {
		p.afterLock = between(rnd, 0, 10*time.Millisecond)
	}
	if chance(rnd, 40) {
		p.afterPut = between(rnd, 0, 30*time.Millisecond)
	}
	return p
}

// drawKeys draws 1–3 messages. Most transactions write one key. They are ascending because a transaction locks its keys
// in that order: two that share two keys must not deadlock.
func drawKeys(rnd *rand.Rand) []string {
	keys := make([]string, 1+rnd.IntN(3))
	same := chance(rnd, 70)
	for i := range keys {
		if i > 0 && same {
			keys[i] = keys[0]
			continue
		}
		switch n := rnd.IntN(100); {
		case n < 5:
			keys[i] = ""
		case n < 35:
			keys[i] = fmt.Sprintf("hot%d", rnd.IntN(hotKeys))
		default:
			keys[i] = fmt.Sprintf("key%02d", rnd.IntN(coldKeys))
		}
	}
	slices.Sort(keys)
	return keys
}

func chance(rnd *rand.Rand, percent int) bool { return rnd.IntN(100) < percent }
