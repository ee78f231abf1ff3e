package torture_test

import (
	"context"
	"flag"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
	"github.com/pgoutbox/watermill-pgoutbox/integration/torture"
)

var (
	duration = flag.Duration("torture.d", 10*time.Second, "how long each run of TestTorture writes")
	chatty   = flag.Bool("torture.log", false, "log what the readers' processes say")
	troubled = flag.Bool("torture.troubled", false, "also lock tables, fail writes of positions and stop backends while processes are killed")
	seed     = flag.Uint64("torture.seed", 0, "seed of the writers' plans; 0 draws one")
)

func TestMain(m *testing.M) {
	if code, isChild := torture.Child(children()); isChild {
		os.Exit(code)
	}
	os.Exit(pgserver.Run(m))
}

// bound is how long another row may wait while transactions are open for seconds.
const bound = 2 * time.Second

// TestTorture runs the harness twice. First undisturbed, with the two readers that must fail beside ours: there nothing may
// come twice. Then our readers alone, two processes each, while they are killed and the server crashes.
func TestTorture(t *testing.T) {
	t.Run("undisturbed", func(t *testing.T) {
		naive := &torture.Entrant{Name: "naive", Reader: torture.Naive{}, Patience: bound}
		xmin := &torture.Entrant{Name: "xmin", Reader: torture.Xmin{}, Patience: bound}
		o := run(t, &torture.Run{Workload: workload(t, *duration), Entrants: append(ours(t, 1, false), naive, xmin)})
		twins := len(o.Verdicts) - 2
		machine := o.Verdicts[twins].Delay // the naive reader waits for nobody, only for the machine
		for i, v := range o.Verdicts[:twins] {
			mustKeep(t, o.Names[i], v, torture.Bounds{Undisturbed: true, Delay: bound + machine})
		}
		mustLose(t, o.Verdicts[twins])
		mustStallAndInvert(t, o.Verdicts[twins+1])
	})
	t.Run("disturbed", func(t *testing.T) {
		o := run(t, &torture.Run{Workload: workload(t, *duration), Entrants: ours(t, 2, true), Server: server(t), Troubled: *troubled})
		if o.Faults == 0 {
			t.Error("the harness is too kind: nothing was broken")
		}
		for i, v := range o.Verdicts {
			mustKeep(t, o.Names[i], v, torture.Bounds{Delay: bound})
		}
	})
}

// TestFullSetReaderPasses is a check on the harness: a reader that is right by construction breaks no promise, although it
// is killed and the server crashes.
func TestFullSetReaderPasses(t *testing.T) {
	fullset := &torture.Entrant{
		Name:        "fullset",
		Reader:      process(t, "fullset"),
		Processes:   2,
		SlowAcks:    true,
		Mortal:      true,
		Refusals:    true,
		LockSession: "fullset",
	}
	o := run(t, &torture.Run{Workload: workload(t, 5*time.Second), Entrants: []*torture.Entrant{fullset}, Server: server(t)})
	mustKeep(t, "fullset", o.Verdicts[0], torture.Bounds{Delay: bound})
}

func mustKeep(t *testing.T, name string, v torture.Verdict, b torture.Bounds) {
	t.Helper()
	for _, broken := range v.Broken(b) {
		t.Errorf("%s: %s", name, broken)
	}
	if v.Overtaken == 0 {
		t.Errorf("the harness is too kind: no ack of %s overtook another", name)
	}
}

// mustLose checks the harness: a workload in which "id > cursor" loses nothing shows nothing.
func mustLose(t *testing.T, naive torture.Verdict) {
	t.Helper()
	if naive.Lost == 0 {
		t.Error("the harness is too kind: the naive reader lost nothing")
	}
}

func mustStallAndInvert(t *testing.T, xmin torture.Verdict) {
	t.Helper()
	if xmin.Inversions == 0 {
		t.Error("the harness is too kind: the xmin reader inverted nothing")
	}
	if least := 4 * time.Second; xmin.Delay < least || xmin.Silence < least {
		t.Errorf("the harness is too kind: the xmin reader's rows waited %v, and it was silent for %v, not %v or more", xmin.Delay, xmin.Silence, least)
	}
	if xmin.Lost+xmin.Ghosts+xmin.Duplicates > 0 {
		t.Errorf("the harness is wrong: the xmin reader lost %d, had %d ghosts and %d duplicates", xmin.Lost, xmin.Ghosts, xmin.Duplicates)
	}
}

// run does r, and prints its table and what went wrong.
func run(t *testing.T, r *torture.Run) torture.Outcome {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), r.Workload.Duration+3*time.Minute)
	defer cancel()
	o, err := r.Do(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("wrote for %v, seed %d, %s\n%s", r.Workload.Duration, r.Workload.Seed, pgserver.Shared(t).Provider(), o)
	for i, v := range o.Verdicts {
		for _, example := range v.Examples {
			t.Logf("%s: %s", o.Names[i], example)
		}
	}
	return o
}

// process runs a reader in a process of its own.
func process(t *testing.T, role string) torture.Process {
	p := torture.Process{Role: role}
	if *chatty {
		p.Logf = t.Logf
	}
	return p
}

// workload is 16 writers in a fresh database.
func workload(t *testing.T, d time.Duration) *torture.Workload {
	t.Helper()
	dsn := pgserver.Database(t)
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	if err := pgoutbox.Migrate(t.Context(), conn, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	s := *seed
	for s == 0 {
		s = rand.Uint64()
	}
	return &torture.Workload{DSN: dsn, Duration: d, Writers: 16, Seed: s}
}

// server is the one to crash: nil, and said aloud, when it is not ours to crash.
func server(t *testing.T) torture.Server {
	t.Helper()
	s := pgserver.Shared(t)
	if s.DataDir() == "" {
		t.Logf("NOT CRASHED: %s is not ours to crash; PGOUTBOX_TEST_PROVIDER=local starts one that is", s.Provider())
		return nil
	}
	return s
}
