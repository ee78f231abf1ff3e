package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"
)

// Server is the PostgreSQL server as far as it is broken on purpose.
type Server interface {
	Stop(ctx context.Context, mode string) error
	StartAgain(ctx context.Context) error
}

// faults breaks things while the workload writes.
type faults struct {
	dsn      string
	from     time.Duration // when the workload began
	duration time.Duration
	server   Server // nil: it is never crashed
	troubled bool
	entrants []*Entrant
	history  *history
	tally    *tally
}

// crashTimes are spread from 10 % to 90 % of a run: two, and one more for each 30 s of a run above a minute.
func crashTimes(run time.Duration) []time.Duration {
	n := max(2, int(run/(30*time.Second)))
	times := make([]time.Duration, n)
	for i := range times {
		times[i] = run/10 + run*8/10*time.Duration(i)/time.Duration(n-1)
	}
	return times
}

// run breaks things until 90 % of the run are over; the rest shows that everybody recovers.
func (f *faults) run(ctx context.Context) error {
	running, ctx := errgroup.WithContext(ctx)
	if f.server != nil {
		running.Go(func() error { return f.crashes(ctx) })
	}
	if f.troubled {
		running.Go(func() error { return f.troubles(ctx) })
	}
	for _, e := range f.entrants {
		if e.Mortal {
			running.Go(func() error { return f.deaths(ctx, e) })
		}
	}
	return running.Wait()
}

func (f *faults) crashes(ctx context.Context) error {
	for _, at := range crashTimes(f.duration) {
		if err := pause(ctx, f.from+at-f.history.now()); err != nil {
			return err
		}
		from := f.history.now()
		if err := f.crash(ctx); err != nil {
			return err
		}
		f.history.broke(Fault{Kind: "crash", At: from, Until: f.history.now()})
		f.tally.add("faults", "server crashed")
	}
	return nil
}

func (f *faults) crash(ctx context.Context) error {
	for _, e := range f.entrants {
		defer e.hold.begin()()
	}
	if err := pause(ctx, holdTime); err != nil {
		return err
	}
	if err := f.server.Stop(ctx, "immediate"); err != nil {
		return fmt.Errorf("crash the server: %w", err)
	}
	if err := f.server.StartAgain(ctx); err != nil {
		return fmt.Errorf("start the crashed server: %w", err)
	}
	return nil
}

// deaths ends one of e's processes every second or so: mostly by SIGKILL, sometimes in an orderly way, sometimes it lives
// on without its lock session.
func (f *faults) deaths(ctx context.Context, e *Entrant) error {
	for {
		if err := pause(ctx, 700*time.Millisecond+rand.N(1000*time.Millisecond)); err != nil {
			return err
		}
		if f.history.now() > f.from+f.duration*9/10 {
			return nil
		}
		from := f.history.now()
		kind, err := f.death(ctx, e)
		if err != nil {
			return err
		}
		if kind != "" {
			f.history.broke(Fault{Kind: kind, Entrant: e.Name, Orderly: kind == "restarted", At: from, Until: f.history.now()})
			f.tally.add("faults", e.Name+" "+kind)
		}
	}
}

// death returns what happened, "" when there was nothing to end. Half the time handlers hang until it is over.
func (f *faults) death(ctx context.Context, e *Entrant) (kind string, err error) {
	if rand.IntN(2) == 0 {
		defer e.hold.begin()()
		if err := pause(ctx, holdTime); err != nil {
			return "", err
		}
	}
	var hit bool
	switch n := rand.IntN(100); {
	case n < 25 && e.LockSession != "":
		kind, hit = "session terminated", f.terminate(ctx, e.LockSession)
	case n < 40:
		kind, hit = "restarted", e.endOne(ErrRestarted)
	default:
		kind, hit = "killed", e.endOne(ErrKilled)
	}
	if !hit {
		return "", nil
	}
	return kind, pause(ctx, 50*time.Millisecond) // a signal needs a moment, and no ack may slip through in it
}

// terminate ends one session with the given application_name; false when there is none, or no server to ask.
func (f *faults) terminate(ctx context.Context, application string) bool {
	conn, err := pgx.Connect(ctx, f.dsn)
	if err != nil {
		return false
	}
	defer conn.Close(ctx)
	var ended bool
	err = conn.QueryRow(ctx, `
		SELECT pg_terminate_backend(pid)
		FROM pg_stat_activity
		WHERE application_name = $1 AND datname = current_database()
		ORDER BY random()
		LIMIT 1`, application).Scan(&ended)
	return err == nil && ended
}
