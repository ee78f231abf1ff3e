package pgoutbox

import (
	"testing"
)

// unloadedShard has rows of one key whose payload must be read before they go out.
func unloadedShard(rows ...string) *shard {
	sh := newTestShard(OrderByKey, 100, 10)
	sh.held = holdMost // so none of these keeps its payload
	sh.fetched(rows...)
	sh.held = 0
	return sh
}

func TestSuccessorOfADeletedRowGoesOut(t *testing.T) {
	sh := unloadedShard("a t", "a t")
	r := sh.reader
	small, _ := r.unread()
	r.loaded(small[0], nil) // somebody deleted the row that blocked its key
	r.loaded(small[1], &entry{record: record{id: 2, xid: 5}, loaded: true})
	if sh.held != 1 {
		t.Fatalf("%d held", sh.held)
	}
	small, _ = r.unread()
	r.giveBack(small) // the server did not answer
	small, _ = r.unread()
	for _, w := range small {
		r.loaded(w, &entry{record: record{id: 2, xid: 5}, loaded: true})
	}
	if run := sh.take(1, 10); len(run) != 1 || run[0].id != 2 {
		t.Fatalf("took %v, the row behind the deleted one waits for ever", run)
	}
	if sh.held != 0 {
		t.Errorf("%d held", sh.held)
	}
}

func TestPayloadThatGrewIsReadAsALargeOne(t *testing.T) {
	sh := unloadedShard("a t")
	r := sh.reader
	small, _ := r.unread()
	grown := &entry{record: record{id: 1, xid: 5, size: inlineLimit + 1}} // somebody repaired the row with an UPDATE
	r.loaded(small[0], grown)
	small, large := r.unread()
	if len(small) != 0 || len(large) != 1 {
		t.Fatalf("read again as %d small and %d large rows: it never fits", len(small), len(large))
	}
	grown.size++
	r.loaded(large[0], grown) // and once more
	if _, large = r.unread(); len(large) != 1 || sh.heavy != grown.size {
		t.Fatalf("%d large rows, %d bytes out", len(large), sh.heavy)
	}
	grown.loaded = true
	r.loaded(large[0], grown)
	run := sh.take(1, 10)
	if len(run) != 1 {
		t.Fatal("it does not go out")
	}
	if r.settled(run[0]); sh.heavy != 0 || sh.held != 0 {
		t.Errorf("%d heavy, %d held", sh.heavy, sh.held)
	}
}

func TestStrayRowIsNotForgottenWhenTheSequencePassesIt(t *testing.T) {
	after := snapshot{epoch: firstEpoch, low: 18, high: 24, xmax: 757}
	tick, err := readTick("28", "757:757:", "28", here, 24, 25) // 25 was probed; an open transaction drew ids up to 28
	if err != nil {
		t.Fatal(err)
	}
	b := batch{after: after, upto: tick.snapshot}
	if b.has(25, 3) && b.quiet(tick.stray) {
		t.Error("the batch has row 25, and nobody looks until a transaction ends")
	}
}
