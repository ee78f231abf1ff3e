package torture

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// Outcome is a run's result: the verdict on each entrant, in their order.
type Outcome struct {
	Names    []string
	Lives    []int
	Verdicts []Verdict
	Faults   int
	Totals   string // what the workload and the faults did, by kind
}

// String is the table of the totals, an entrant a line, and what was done to them below it.
func (o Outcome) String() string {
	var b strings.Builder
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, column := range []string{
		"reader", "lives", "committed", "handled", "lost", "ghosts", "damaged", "inverted", "overlaps", "overtaken",
		"duplicates", "unexplained", "undone", "delay", "worst", "silence",
	} {
		fmt.Fprint(table, column, "\t")
	}
	fmt.Fprintln(table)
	for i, v := range o.Verdicts {
		fmt.Fprint(table, o.Names[i], "\t")
		for _, n := range []int{
			o.Lives[i], v.Committed, v.Handled, v.Lost, v.Ghosts, v.Damaged, v.Inversions, v.Overlaps, v.Overtaken, v.Duplicates, v.Unexplained,
		} {
			fmt.Fprint(table, n, "\t")
		}
		for _, d := range []time.Duration{v.Undone, v.Delay, v.Worst, v.Silence} {
			fmt.Fprint(table, d.Round(time.Millisecond), "\t")
		}
		fmt.Fprintln(table)
	}
	_ = table.Flush() // into memory
	b.WriteString("overtaken: acks that came out of order\n")
	b.WriteString("undone: longest from an ack to the fault that made its message come again\n")
	b.WriteString("delay: longest from commit to first delivery, of other rows while long transactions were open, outside faults\n")
	b.WriteString("worst: the same of all rows at all times; silence: longest without a first delivery while a row waited\n")
	b.WriteString(o.Totals)
	return b.String()
}
