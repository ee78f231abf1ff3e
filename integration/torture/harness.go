package torture

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

//go:embed tables.sql
var tables string

// Run is one run of the harness: a workload, the entrants that read it, and what is broken meanwhile.
type Run struct {
	Workload *Workload
	Entrants []*Entrant
	Server   Server // is crashed; nil = not
	Troubled bool   // every 2 s something goes wrong in the database too
	// Saved is how long before a fault an ack is certain to survive it; 0 = 1.5 s: the readers' save interval, and three
	// times wal_writer_delay for an asynchronous commit.
	Saved time.Duration

	history history
}

const (
	defaultSaved    = 1500 * time.Millisecond // Run.Saved
	defaultPatience = 15 * time.Second        // Entrant.Patience
	readyTime       = 30 * time.Second        // how long a reader may take until its first delivery
)

// Do runs the workload in a database that has the outbox's schema, waits until the entrants have read everything or given
// up, and judges them.
func (r *Run) Do(ctx context.Context) (Outcome, error) {
	w := r.Workload
	r.history.start = time.Now()
	w.history, w.crashes = &r.history, r.Server != nil
	w.finisher = newFinisher(w)
	if err := w.once(ctx, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, tables)
		return err
	}); err != nil {
		return Outcome{}, fmt.Errorf("create the application's tables: %w", err)
	}

	reading, stop := context.WithCancel(ctx)
	defer stop()
	readers, reading := errgroup.WithContext(reading)
	for _, e := range r.Entrants {
		e.history, e.sink = &r.history, &sink{history: &r.history}
		readers.Go(func() error { return e.run(reading, w.DSN) })
	}
	oracle, err := r.write(reading)
	stop()
	if readErr := readers.Wait(); readErr != nil {
		return Outcome{}, readErr // it is why writing ended, if that failed too
	}
	if err != nil {
		return Outcome{}, err
	}
	return r.judge(oracle), nil
}

// write writes a probe, then the workload, and returns what committed once the entrants have read it or given up.
func (r *Run) write(ctx context.Context) ([]Entry, error) {
	if err := r.probe(ctx); err != nil {
		return nil, err
	}
	w := r.Workload
	f := &faults{
		dsn: w.DSN, from: r.history.now(), duration: w.Duration,
		server: r.Server, troubled: r.Troubled, entrants: r.Entrants, history: &r.history, tally: &w.tally,
	}
	running, group := errgroup.WithContext(ctx)
	running.Go(func() error { return w.Run(group) })
	running.Go(func() error { return f.run(group) })
	if err := running.Wait(); err != nil {
		return nil, err
	}
	oracle, err := r.oracle(ctx)
	if err != nil {
		return nil, err
	}
	for _, e := range r.Entrants {
		if err := r.drain(ctx, e, oracle); err != nil {
			return nil, err
		}
	}
	return oracle, pause(ctx, 500*time.Millisecond) // for what comes although everything was there
}

// probe writes one message and waits until every entrant has delivered it, so that the start of a reader is no delay.
func (r *Run) probe(ctx context.Context) error {
	w := r.Workload
	if err := w.once(ctx, func(conn *pgx.Conn) error {
		if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
			return err
		}
		if _, err := w.putLong(ctx, conn, "probe"); err != nil {
			return err
		}
		_, err := conn.Exec(ctx, "COMMIT")
		return err
	}); err != nil {
		return fmt.Errorf("write the probe: %w", err)
	}
	oracle, err := r.oracle(ctx)
	if err != nil {
		return err
	}
	for _, e := range r.Entrants {
		for e.sink.missing(oracle) > 0 {
			if r.history.now() > readyTime {
				return fmt.Errorf("%s delivered nothing within %v", e.Name, readyTime)
			}
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
		}
	}
	return nil
}

func (r *Run) oracle(ctx context.Context) (oracle []Entry, err error) {
	err = r.Workload.once(ctx, func(conn *pgx.Conn) error {
		oracle, err = readOracle(ctx, conn)
		return err
	})
	return oracle, err
}

// drain waits until e has handled what committed, or none of what is missing has come for as long as its patience.
func (r *Run) drain(ctx context.Context, e *Entrant, oracle []Entry) error {
	patience := e.Patience
	if patience == 0 {
		patience = defaultPatience
	}
	for least, since := len(oracle)+1, time.Now(); ; {
		missing := e.sink.missing(oracle)
		if missing < least {
			least, since = missing, time.Now()
		}
		if missing == 0 || time.Since(since) > patience {
			return nil
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
}

func (r *Run) judge(oracle []Entry) Outcome {
	saved := r.Saved
	if saved == 0 {
		saved = defaultSaved
	}
	out := Outcome{Totals: r.Workload.tally.String(), Faults: len(r.history.faults)}
	for _, e := range r.Entrants {
		out.Names, out.Lives = append(out.Names, e.Name), append(out.Lives, e.lives)
		out.Verdicts = append(out.Verdicts, Judge(oracle, e.sink.log, r.history.of(e.Name), saved))
	}
	return out
}
