package main

import (
	"testing"
)

// threeOrders are two orders of one customer and one of another; faithful is what a faithful relay makes of them.
var threeOrders = []order{{ID: 5, Customer: 1, Number: 1}, {ID: 9, Customer: 1, Number: 2}, {ID: 7, Customer: 2, Number: 1}}

func faithful() []delivery {
	var all []delivery
	for _, topic := range topics {
		for i, o := range threeOrders {
			all = append(all, delivery{topic: topic, at: streamID{ms: int64(100 + 10*i)}, uuid: o.uuid(topic), order: o})
		}
	}
	return all
}

func TestJudge(t *testing.T) {
	tests := []struct {
		name                               string
		change                             func([]delivery) []delivery
		lost, ghosts, duplicates, inverted int
		fine                               bool
	}{
		{
			name:   "accepts a faithful relay",
			change: func(all []delivery) []delivery { return all },
			fine:   true,
		},
		{
			name:   "misses a message",
			change: func(all []delivery) []delivery { return all[1:] },
			lost:   1,
		},
		{
			name:   "misses everything",
			change: func([]delivery) []delivery { return nil },
			lost:   9,
		},
		{
			name: "knows no order that rolled back",
			change: func(all []delivery) []delivery {
				o := order{ID: 6, Customer: 1, Number: 2}
				return append(all, delivery{topic: "orders", at: streamID{ms: 900}, uuid: o.uuid("orders"), order: o})
			},
			ghosts: 1,
		},
		{
			name:   "sees a changed payload",
			change: func(all []delivery) []delivery { all[0].order.Number = 3; return all },
			lost:   1, ghosts: 1,
		},
		{
			name:   "sees a message in the wrong stream",
			change: func(all []delivery) []delivery { all[0].topic = "payments"; return all },
			lost:   1, ghosts: 1,
		},
		{
			name: "allows a message twice, whatever comes between",
			change: func(all []delivery) []delivery {
				again := all[0]
				again.at.ms = 900
				return append(all, again)
			},
			duplicates: 1, fine: true,
		},
		{
			name: "counts a message that overtook one in its stream",
			change: func(all []delivery) []delivery {
				for i := range all {
					all[i].at.ms = 100 // Redis was fast
				}
				all[0].at.n, all[1].at.n = 2, 1
				return all
			},
			inverted: 1,
		},
		{
			name: "counts a message that overtook one in another stream",
			change: func(all []delivery) []delivery {
				all[len(topics)].at.ms = 99 // the payment of the first order came before the order
				return all
			},
			inverted: 1,
		},
		{
			name: "asks for no order between customers",
			change: func(all []delivery) []delivery {
				for i := range all {
					if all[i].order.Customer == 2 {
						all[i].at.ms = 1
					}
				}
				return all
			},
			fine: true,
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			v := judge(threeOrders, test.change(faithful()))
			if v.lost != test.lost || v.ghosts != test.ghosts || v.duplicates != test.duplicates || v.inverted != test.inverted {
				t.Errorf("got %+v", v)
			}
			if v.fine() != test.fine {
				t.Errorf("fine is %t", v.fine())
			}
			if v.forwarded+v.lost != v.committed || v.committed != 9 {
				t.Errorf("%d forwarded and %d lost of %d", v.forwarded, v.lost, v.committed)
			}
		})
	}
}
