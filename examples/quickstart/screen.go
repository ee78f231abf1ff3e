package main

import (
	"context"
	"fmt"
	"io"
	"sync"
	"text/tabwriter"
	"time"
)

// screen is where a run tells how it goes. It is safe for concurrent use.
type screen struct {
	mu    sync.Mutex
	out   io.Writer
	began time.Time
}

func newScreen(out io.Writer) *screen { return &screen{out: out, began: time.Now()} }

func (s *screen) linef(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fmt.Fprintf(s.out, format+"\n", args...)
}

// eventf is a line with the time since the start of the program.
func (s *screen) eventf(format string, args ...any) {
	s.linef("%4.1fs  "+format, append([]any{time.Since(s.began).Seconds()}, args...)...)
}

// watch prints the live numbers once a second until ctx ends, and the take-over when it comes.
func (s *screen) watch(ctx context.Context, m *meter) {
	second := time.NewTicker(time.Second)
	defer second.Stop()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	told := false
	for {
		select {
		case <-second.C:
			t := m.totals()
			s.eventf("committed %6d   forwarded %6d   lag %5d", t.committed, t.forwarded, t.lag)
		case <-look.C:
			if after, ok := m.takeOver(); ok && !told {
				told = true
				s.eventf("a new session leads, its first message was forwarded %s after the termination", seconds(after))
			}
		case <-ctx.Done():
			return
		}
	}
}

// rate tells how fast a backlog was forwarded.
func (s *screen) rate(took time.Duration, m *meter) {
	n := m.totals().forwarded
	s.eventf("backlog of %d messages forwarded in %s: %.0f messages/s", n, seconds(took), float64(n)/took.Seconds())
}

// table prints the verdict.
func (s *screen) table(v verdict, m *meter, hold time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, beside := m.longest()
	takeOver := "nobody took over"
	if after, ok := m.takeOver(); ok {
		takeOver = seconds(after)
	}
	fmt.Fprintln(s.out)
	w := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "committed\t%d\tmessages of %d orders; %d more rolled back\n", v.committed, v.orders, m.rolledBack)
	fmt.Fprintf(w, "forwarded\t%d\n", v.forwarded)
	fmt.Fprintf(w, "lost\t%d\n", v.lost)
	fmt.Fprintf(w, "ghosts\t%d\n", v.ghosts)
	fmt.Fprintf(w, "duplicates\t%d\tun-acked, or not saved as acked, when the lock session was terminated\n", v.duplicates)
	fmt.Fprintf(w, "out of order per key\t%d\n", v.inverted)
	fmt.Fprintf(w, "longest delivery delay\t%s\t%s beside the transaction that stayed open for %s\n", seconds(all), seconds(beside), hold)
	fmt.Fprintf(w, "take-over time\t%s\n", takeOver)
	_ = w.Flush() // nobody is left to tell when the terminal is gone
	fmt.Fprintln(s.out)
	for _, example := range v.examples {
		fmt.Fprintln(s.out, example)
	}
	if v.fine() {
		fmt.Fprintln(s.out, "Nothing was lost, invented or out of order.")
	} else {
		fmt.Fprintln(s.out, "FAILED. Run it again with -v to see the logs.")
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", d.Seconds()) }
