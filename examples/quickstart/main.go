// Command quickstart shows the outbox at work, with nothing to set up: it finds or starts PostgreSQL and Redis, writes orders
// and their messages in one transaction each, and forwards every message to Redis Streams while it makes trouble:
// transactions roll back, one stays open for seconds, some get their transaction id long before they write, and half-way
// the relay's lock session is terminated. In the end it reads the streams back and compares them with the orders that
// committed. It exits with 1 if anything was lost, invented or out of order.
//
//	go run ./examples/quickstart
//	go run ./examples/quickstart -bridge
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/ThreeDotsLabs/watermill"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the process at once; the servers are cleaned up all the same
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

const (
	exitFine        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitInterrupted = 130
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	d, err := parse(args, stdout, stderr)
	if errors.Is(err, flag.ErrHelp) {
		return exitFine
	}
	if err != nil {
		return exitUsage
	}
	return d.exitCode(ctx, stderr)
}

// exitCode runs the demo and says how it went.
func (d *demo) exitCode(ctx context.Context, stderr io.Writer) int {
	v, err := d.run(ctx)
	switch {
	case ctx.Err() != nil:
		fmt.Fprintln(stderr, "interrupted; what was started has been stopped")
		return exitInterrupted
	case err != nil:
		fmt.Fprintln(stderr, "quickstart:", err)
		return exitFailed
	case !v.fine():
		return exitFailed
	}
	return exitFine
}

// parse reads the flags. What is wrong with them has been printed when it returns an error.
func parse(args []string, stdout, stderr io.Writer) (*demo, error) {
	d := &demo{screen: newScreen(stdout), hold: 4 * time.Second, patience: 10 * time.Second, logger: watermill.NopLogger{}}
	flags := flag.NewFlagSet("quickstart", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.IntVar(&d.rows, "rows", 15_000, "stop writing when about so many messages are committed")
	flags.IntVar(&d.writers, "writers", 8, "transactions written at the same time")
	flags.IntVar(&d.rate, "rate", 1_500, "messages written per second, at most")
	flags.DurationVar(&d.duration, "duration", 12*time.Second, "stop writing after so long")
	flags.BoolVar(&d.bridge, "bridge", false, "forward with a PublisherBridge instead of a Router")
	flags.IntVar(&d.backlog, "backlog", -1, "messages written before forwarding begins, to measure its rate (default 30000 with -bridge, else 0)")
	verbose := flags.Bool("v", false, "show the logs of the library and of the Router")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if *verbose {
		d.logger = watermill.NewStdLoggerWithOut(stderr, false, false)
	}
	if d.backlog < 0 {
		d.backlog = 0
		if d.bridge {
			d.backlog = 30_000
		}
	}
	if d.rows <= 0 || d.writers <= 0 || d.rate <= 0 || d.duration <= 0 || flags.NArg() > 0 {
		err := errors.New("rows, writers, rate and duration must be positive, and nothing may follow the flags")
		fmt.Fprintln(stderr, err)
		return nil, err
	}
	return d, nil
}
