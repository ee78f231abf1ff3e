package torture

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
)

// troubleEvery is how long there is peace between two troubles, on average.
const troubleEvery = 2 * time.Second

// trouble is something that the database has for a while and gets over by itself. A process that meets it has to go on.
type trouble struct {
	kind  string
	sql   string        // begins it
	after string        // ends it
	most  time.Duration // how long it lasts
}

var sqlTroubles = []trouble{
	{"positions locked", "BEGIN; LOCK TABLE outbox_cursors IN ACCESS EXCLUSIVE MODE", "COMMIT", 3 * time.Second},
	{"rows locked", "BEGIN; LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE", "COMMIT", time.Second},
	{"positions fail", `CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '53100'; END $$;
		CREATE TRIGGER fails BEFORE UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION fails()`, "DROP FUNCTION fails CASCADE", 2 * time.Second},
}

// troubles makes them until 90 % of the run are over.
func (f *faults) troubles(ctx context.Context) error {
	for {
		if err := pause(ctx, troubleEvery/2+rand.N(troubleEvery)); err != nil {
			return err
		}
		if f.history.now() > f.from+f.duration*9/10 {
			return nil
		}
		from := f.history.now()
		kind, err := f.trouble(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			kind += ", cut short" // by a crash of the server
		}
		f.history.broke(Fault{Kind: kind, At: from, Until: f.history.now()})
		f.tally.add("faults", kind)
	}
}

func (f *faults) trouble(ctx context.Context) (kind string, err error) {
	conn, err := pgx.Connect(ctx, f.dsn)
	if err != nil {
		return "no trouble", err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "DROP FUNCTION IF EXISTS fails CASCADE"); err != nil { // left by one that was cut short
		return "no trouble", err
	}
	n := rand.IntN(len(sqlTroubles) + 1)
	if n == len(sqlTroubles) {
		return "a backend stood still", f.freeze(ctx, conn)
	}
	t := sqlTroubles[n]
	if _, err := conn.Exec(ctx, t.sql); err != nil {
		return t.kind, err
	}
	if err := pause(ctx, t.most/10+rand.N(t.most)); err != nil {
		return t.kind, err
	}
	_, err = conn.Exec(ctx, t.after)
	return t.kind, err
}

// freeze stops the server process of somebody's lock session, which then holds its locks and answers nothing.
func (f *faults) freeze(ctx context.Context, conn *pgx.Conn) error {
	var pid int
	err := conn.QueryRow(ctx, `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'pgoutbox %'
		ORDER BY random() LIMIT 1`).Scan(&pid)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return err
	}
	if err := process.Signal(stopSignal); err != nil {
		return fmt.Errorf("stop a backend: %w", err)
	}
	stood := pause(ctx, 200*time.Millisecond+rand.N(4*time.Second))
	return errors.Join(stood, process.Signal(continueSignal))
}
