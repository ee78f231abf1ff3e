package pgoutbox

import (
	"slices"
	"time"
)

// aheadPause is between pages that are read for some shards only, while others have plenty.
const aheadPause = 20 * time.Millisecond

// forget drops the shards that are no longer led.
func (r *reader) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for number, sh := range r.shards {
		if sh.gone {
			delete(r.shards, number)
		}
	}
	r.scans = slices.DeleteFunc(r.scans, func(sc *scan) bool {
		sc.shards = slices.DeleteFunc(sc.shards, func(sh *shard) bool { return sh.gone })
		return len(sc.shards) == 0
	})
}

// advance gives every scan that read its batch to the end the next one, and lets scans that stand at the same place go on
// as one.
func (r *reader) advance() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.merge()
	for _, sc := range r.scans {
		if !sc.at.atEnd() {
			continue
		}
		for _, sh := range sc.shards {
			if sc.ticked > sh.born { // what was there when the shard was taken over has been read
				sh.more = 0
			}
		}
		if sc.ticked >= r.tick.n {
			continue
		}
		sc.ticked = r.tick.n
		next := batch{after: sc.at.batch.upto, upto: r.tick.snapshot}
		if next.quiet(r.tick.stray) {
			continue
		}
		sc.begin(r.tick.snapshot)
		for _, sh := range sc.shards {
			sh.cursor.reach(sc.at)
		}
	}
}

func (r *reader) merge() {
	for i := 0; i < len(r.scans); i++ {
		for j := len(r.scans) - 1; j > i; j-- {
			one, other := r.scans[i], r.scans[j]
			if one.sameAs(other) {
				one.shards = append(one.shards, other.shards...)
				one.ticked = min(one.ticked, other.ticked)
				r.scans = slices.Delete(r.scans, j, j+1)
			}
		}
	}
}

// wants returns how many rows the scan should fetch now, 0 when its shards have enough to do or no room. Where some shards have
// plenty and others nothing, because few keys are in use or a shard is slow, it walks on for the others at a moderate pace:
// too fast, and the rows that pile up must be read twice.
func (r *reader) wants(sc *scan) int {
	if sc.at.atEnd() {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	low := max(pageRows/2/len(sc.shards), 32)
	hungry, ready := false, 0
	for _, sh := range sc.shards {
		hungry = hungry || sh.hungry(low)
		ready += sh.queue.ready.len()
	}
	if !hungry {
		return 0
	}
	if wait := aheadPause - time.Since(sc.fetched); ready >= 2*pageRows && wait > 0 {
		r.again = min(r.again, wait)
		return 0
	}
	if len(sc.shards) == 1 {
		return min(pageRows, sc.shards[0].room())
	}
	return min(pageRows, max(1, r.window*len(sc.shards)/2))
}

// deliver queues a page. A shard that has no room for its part of it leaves the scan and stays where it was: it must not hold
// the others back.
func (r *reader) deliver(sc *scan, p page) {
	r.mu.Lock()
	defer r.mu.Unlock()
	parts := make(map[int][]*entry, len(sc.shards))
	for _, e := range p.rows {
		number := e.slot % r.fetcher.consumer.shards
		parts[number] = append(parts[number], e)
	}
	from := sc.at
	sc.at, sc.fetched = p.to, time.Now()
	sc.found = sc.found || len(p.rows) > 0
	sc.shards = slices.DeleteFunc(sc.shards, func(sh *shard) bool {
		part, room := parts[sh.shard], max(0, sh.room())
		full := len(part) > room
		to := p.to
		if full {
			to, part = from, part[:room]
		}
		for _, e := range part {
			sh.cursor.add(e, p.to.batch)
			sh.suspectNext(e)
			sh.enqueue(e)
			if full {
				to = position{p.to.batch, e.id}
			}
		}
		sh.cursor.reach(to)
		r.offer(sh)
		if full && !sh.gone {
			r.scans = append(r.scans, &scan{at: to, shards: []*shard{sh}, ticked: sc.ticked, found: true})
		}
		return full
	})
	if len(sc.shards) == 0 {
		r.scans = slices.DeleteFunc(r.scans, func(other *scan) bool { return other == sc })
	}
}
