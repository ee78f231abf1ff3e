package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// replica is a standby that pages are read from when it has replayed the log up to the last tick: then it shows whatever the tick's
// snapshot counts as visible. It is asked by a statement before the page, on the same connection, because what a statement sees
// is fixed before it can ask. One that is late, away, promoted or another server's is passed over for the primary; the bounds
// below say how long that may take.
//
// It belongs to the goroutine of one reader.
type replica struct {
	pool   *pgxpool.Pool
	state  string        // the statement
	home   func() string // what the primary is called
	report reporter

	position string    // of the log at the tick, "": not known, so the primary serves
	passed   time.Time // over until then
	told     time.Time
}

const (
	replicaPatience = 50 * time.Millisecond // for a connection, for an answer, and for the log to arrive
	replicaPause    = time.Second           // before one that failed is asked again
	behindPause     = 100 * time.Millisecond
	replicaPage     = 2 * time.Second // a page that takes longer is read from the primary
)

var errBehind = errors.New("it has not replayed the log so far")

func (r *replica) serves() bool {
	return r != nil && r.position != "" && time.Now().After(r.passed)
}

// read is one page. Its rows are copies, given out only when it is known that all of them were read from a standby.
func (r *replica) read(ctx context.Context, sql string, args []any) ([][][]byte, error) {
	ctx, done := context.WithTimeout(ctx, replicaPage)
	defer done()
	acquiring, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	conn, err := r.pool.Acquire(acquiring)
	if err != nil {
		return nil, fmt.Errorf("take a connection of ReadPool: %w", err)
	}
	defer conn.Release()
	if err := r.await(ctx, conn); err != nil {
		return nil, err
	}
	var rows [][][]byte
	var still string
	statements := append(pageStatements(sql, args), pageStatement{sql: "SELECT pg_is_in_recovery()::text"})
	err = runPage(ctx, conn, statements, func(statement int, values [][]byte) error {
		switch statement {
		case pageItself:
			row := make([][]byte, len(values))
			for i, value := range values {
				if value != nil {
					row[i] = append([]byte{}, value...)
				}
			}
			rows = append(rows, row)
		case len(statements) - 1:
			still = string(values[0])
		}
		return nil
	})
	if err == nil && still != "true" { // what was removed there since is still to be delivered
		err = errors.New("it was promoted meanwhile")
	}
	return rows, err
}

// await waits a moment until the standby has replayed the log.
func (r *replica) await(ctx context.Context, conn *pgxpool.Conn) error {
	for deadline := time.Now().Add(replicaPatience); ; pause(ctx, 2*time.Millisecond) {
		caught, err := r.ask(ctx, conn)
		if err != nil || caught {
			return err
		}
		if time.Now().After(deadline) || ctx.Err() != nil {
			return errBehind
		}
	}
}

func (r *replica) ask(ctx context.Context, conn *pgxpool.Conn) (caught bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, replicaPatience)
	defer cancel()
	answer := conn.Conn().PgConn().ExecParams(ctx, r.state, [][]byte{[]byte(r.position)}, nil, nil, nil).Read()
	if answer.Err != nil {
		return false, answer.Err
	}
	row, home := answer.Rows[0], r.home()
	switch {
	case string(row[0]) != "t":
		return false, errors.New("it is not a standby")
	case home == "" || string(row[2]) != home:
		return false, fmt.Errorf("it is not a standby of this database (%s, this one is %s)", row[2], home)
	}
	return string(row[1]) == "t", nil
}

// passOver has the primary serve for a while.
func (r *replica) passOver(err error) {
	r.passed = time.Now().Add(replicaPause)
	if errors.Is(err, errBehind) {
		r.passed = time.Now().Add(behindPause)
	}
	if time.Since(r.told) > reportEvery {
		r.told = time.Now()
		r.report.failed("the replica is passed over, the primary serves", err, nil)
	}
}

// checkReadPool refuses a ReadPool that leads to another database. One that does not answer is passed over until it does.
func (s *settings) checkReadPool(ctx context.Context, g *leadership) error {
	if s.readPool == nil {
		return nil
	}
	home := g.home.Load()
	if home == nil {
		return nil // the lock session was lost meanwhile
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	var there string
	err := s.readPool.QueryRow(ctx, s.names.query("home"), pgx.QueryExecModeExec).Scan(&there)
	switch {
	case hasCode(err, codeInsufficientPrivilege):
		return permanent(fmt.Errorf("GRANT EXECUTE ON FUNCTION pg_control_system() to the role of ReadPool: %w", err))
	case err == nil && *home != "" && there != *home:
		return permanent(fmt.Errorf("ReadPool leads to another database (%s, the pool's is %s)", there, *home))
	}
	return nil
}

// learnHome asks what the server of the lock session is called, for the replica to be compared with.
func (g *leadership) learnHome(ctx context.Context, s *session) error {
	row, err := s.ask(ctx, g.queries.home)
	if hasCode(err, codeInsufficientPrivilege) {
		return permanent(fmt.Errorf("GRANT EXECUTE ON FUNCTION pg_control_system() to the role of the lock session: %w", err))
	}
	if err != nil {
		return fmt.Errorf("ask the server who it is: %w", err)
	}
	g.home.Store(&row[0])
	return nil
}
