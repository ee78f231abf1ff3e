//go:build unix

package cases_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// fault is something that goes wrong under load. It lasts until mend.
type fault struct {
	name  string
	begin func(t *testing.T, ob *outbox, s *pgserver.Server) (mend func())
	red   bool // the reader is not healthy meanwhile; otherwise the fault does not keep rows from being delivered
}

// failing has every write of a position fail.
func failing(code string) func(*testing.T, *outbox, *pgserver.Server) func() {
	return func(_ *testing.T, ob *outbox, _ *pgserver.Server) func() {
		ob.Exec(fmt.Sprintf(`CREATE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN RAISE EXCEPTION 'on purpose' USING ERRCODE = '%s'; END $$;
			CREATE TRIGGER fails BEFORE UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION fails()`, code))
		return func() { ob.Exec("DROP FUNCTION fails CASCADE") }
	}
}

// down stops the server until mend.
func down(mode string) func(*testing.T, *outbox, *pgserver.Server) func() {
	return func(t *testing.T, _ *outbox, s *pgserver.Server) func() {
		t.Helper()
		must(t, s.Stop(t.Context(), mode))
		return func() { must(t, s.StartAgain(t.Context())) }
	}
}

// noConnections ends every session of the reader's role and lets none begin: 53300.
func noConnections(_ *testing.T, ob *outbox, _ *pgserver.Server) func() {
	ob.Exec("ALTER ROLE reader CONNECTION LIMIT 0")
	ob.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader'")
	return func() { ob.Exec("ALTER ROLE reader CONNECTION LIMIT -1") }
}

// noNames has the server's name not be found.
var noNames atomic.Bool

func lostNames(_ *testing.T, ob *outbox, _ *pgserver.Server) func() {
	noNames.Store(true)
	ob.Exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'reader'")
	return func() { noNames.Store(false) }
}

// FC-04: whatever the database says, the loop goes on when it is over. The channel stays open, the reader says that it is not healthy
// while rows cannot come, and everything comes.
func TestFC04_EveryDatabaseErrorIsSurvived(t *testing.T) {
	t.Parallel()
	lasts := time.Second
	if outboxtest.Full() {
		lasts = 30 * time.Second
	}
	server := ownServer(t, nil)
	ob, s := newOutboxIn(t, server.Database(t)), newSink()
	ob.Exec("CREATE ROLE reader LOGIN")
	ob.Exec("GRANT ALL ON ALL TABLES IN SCHEMA public TO reader; GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO reader; " +
		"GRANT EXECUTE ON FUNCTION pg_control_system() TO reader")
	pool := pgserver.Pool(t, ob.DSN, func(c *pgxpool.Config) {
		c.ConnConfig.User = "reader"
		lookup := c.ConnConfig.LookupFunc
		c.ConnConfig.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
			if noNames.Load() {
				return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
			}
			return lookup(ctx, host)
		}
	})
	r := newReader(t, pool, fourShards)
	r.subscribe(t, "reader", s, ackAll)
	ob.probe(t, s, 10*time.Second)
	n := 0
	for _, f := range []fault{
		{"the disk is full (53100)", failing("53100"), false},
		{"a deadlock (40P01)", failing("40P01"), false},
		{"no serialization (40001)", failing("40001"), false},
		{"a statement timeout (57014)", failing("57014"), false},
		{"an internal error (XX000)", failing("XX000"), false},
		{"a fast stop (57P01), refused connections, and a start (57P03)", down("fast"), true},
		{"a crash (57P02)", down("immediate"), true},
		{"too many connections (53300)", noConnections, true},
		{"the name is not found", lostNames, true},
	} {
		t.Run(f.name, func(t *testing.T) {
			mend := f.begin(t, ob, server)
			outboxtest.Eventually(t, 10*time.Second, "the reader knows", func() (bool, string) {
				if !f.red { // rows are delivered all the same
					ob.probe(t, s, 5*time.Second)
					return true, ""
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				err := r.sub.Healthy(ctx)
				return err != nil, fmt.Sprint(err)
			})
			outboxtest.Pause(t.Context(), lasts)
			mend()
			ob.Pool.Reset()
			var err error
			for range 20 { // written for the outage, as an application would
				n++
				if err = ob.putTx(t.Context(), "", fmt.Sprintf("load %d", n)); err == nil {
					break
				}
				outboxtest.Pause(t.Context(), 200*time.Millisecond)
			}
			must(t, err)
			ob.probe(t, s, 15*time.Second)
			outboxtest.Eventually(t, 15*time.Second, "the reader is healthy", func() (bool, string) {
				err := r.sub.Healthy(t.Context())
				return err == nil, fmt.Sprint(err)
			})
		})
	}
	ob.judgeDeliveries(t, s)
	r.close(t)
}

// FC-16: the server becomes a standby and, later, a primary again. A reader leads nothing and delivers nothing meanwhile, says so, and goes
// on by itself; the pool's connections to what the server was are of no importance.
func TestFC16_DemotedServerIsLeftAndComesBack(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil)
	ob, s := newOutboxIn(t, server.Database(t)), newSink()
	r := ob.read(t, "reader", s, ackAll, fourShards)
	ob.probe(t, s, 10*time.Second)
	must(t, server.Demote(t.Context()))
	ob.Pool.Reset()
	ob.Eventually("the server answers as a standby", "SELECT pg_is_in_recovery()")
	outboxtest.Eventually(t, 15*time.Second, "the reader is not healthy and names the standby", func() (bool, string) {
		err := r.sub.Healthy(t.Context())
		return err != nil && len(r.log.Lines("recovery")) > 0, fmt.Sprint(err)
	})
	if locks := ob.Locks(); len(locks) > 0 {
		t.Errorf("locks are held on a standby: %v", locks)
	}
	var pg interface{ SQLState() string }
	if err := ob.putTx(t.Context(), "", "refused"); !errors.As(err, &pg) || pg.SQLState() != "25006" {
		t.Errorf("publishing to a standby: %v", err)
	}
	ob.Exec("SELECT pg_promote()")
	ob.Eventually("the server is a primary", "SELECT NOT pg_is_in_recovery()")
	ob.probe(t, s, 15*time.Second)
	ob.judge(t, s)
	r.close(t)
}
