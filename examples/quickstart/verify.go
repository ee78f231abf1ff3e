package main

import (
	"cmp"
	"fmt"
	"slices"
)

// verdict compares what was forwarded with what committed.
type verdict struct {
	orders     int // that committed
	committed  int // messages of theirs
	forwarded  int // of these, found in Redis
	lost       int // of these, not found
	ghosts     int // found, but nothing that committed: rolled back, in a wrong stream, or changed on the way
	duplicates int // found once more
	inverted   int // first found after a later message of the same customer
	examples   []string
}

// fine is what the library promises. Duplicates are allowed, since the lock session was terminated.
func (v *verdict) fine() bool { return v.lost == 0 && v.ghosts == 0 && v.inverted == 0 }

// judge is given the orders that committed, in any order, and the content of the streams, each in its own order.
func judge(orders []order, found []delivery) verdict {
	v := verdict{orders: len(orders), committed: len(orders) * len(topics)}
	truth := make(map[order]bool, len(orders))
	for _, o := range orders {
		truth[o] = true
	}
	first := make(map[string]delivery, len(found)) // by UUID
	for _, d := range found {
		if !truth[d.order] || d.uuid != d.order.uuid(d.topic) {
			v.ghosts++
			v.notef("ghost: %s with %+v in stream %s", d.uuid, d.order, d.topic)
		} else if _, ok := first[d.uuid]; ok {
			v.duplicates++
		} else {
			first[d.uuid] = d
		}
	}
	for _, o := range orders {
		for _, topic := range topics {
			if _, ok := first[o.uuid(topic)]; !ok {
				v.lost++
				v.notef("lost: %s of customer %d, order number %d", o.uuid(topic), o.Customer, o.Number)
			}
		}
	}
	v.forwarded = len(first)
	v.checkOrder(orders, first)
	return v
}

// checkOrder walks through the messages of each customer as they were published: order by order, topic by topic. Within a
// stream, none may stand before an earlier one. Entries of different streams are compared by their times, which must not
// go back.
func (v *verdict) checkOrder(orders []order, first map[string]delivery) {
	orders = slices.SortedFunc(slices.Values(orders), func(a, b order) int {
		return cmp.Or(cmp.Compare(a.Customer, b.Customer), cmp.Compare(a.Number, b.Number))
	})
	var latest map[string]streamID // of the customer, by topic
	var ms int64
	for i, o := range orders {
		if i == 0 || o.Customer != orders[i-1].Customer {
			latest, ms = map[string]streamID{}, 0
		}
		for _, topic := range topics {
			d, ok := first[o.uuid(topic)]
			if !ok {
				continue
			}
			if d.at.before(latest[topic]) || d.at.ms < ms {
				v.inverted++
				v.notef("out of order: %s of customer %d, order number %d", d.uuid, o.Customer, o.Number)
				continue
			}
			latest[topic], ms = d.at, d.at.ms
		}
	}
}

// notef keeps a few examples.
func (v *verdict) notef(format string, args ...any) {
	const most = 10
	if len(v.examples) < most {
		v.examples = append(v.examples, fmt.Sprintf(format, args...))
	}
}
