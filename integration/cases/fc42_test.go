package cases_test

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// FC-42: passwords live for a short time, and the pool's BeforeConnect supplies the one of the moment. When the sessions end, the lock
// session must come back with the new one too.
func TestFC42_RotatedPasswordIsAskedForAgain(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil) // whose pg_hba.conf asks for passwords
	ob, s := newOutboxIn(t, server.DSN()), newSink()
	ob.Exec(`CREATE ROLE relay LOGIN SUPERUSER PASSWORD 'first'`)
	hba := filepath.Join(server.DataDir(), "pg_hba.conf")
	rules, err := os.ReadFile(hba)
	must(t, err)
	must(t, os.WriteFile(hba, append([]byte("host all relay all scram-sha-256\n"), rules...), 0o600))
	ob.Exec("SELECT pg_reload_conf()")
	var password atomic.Value
	password.Store("first")
	var asked atomic.Int64
	pool := pgserver.Pool(t, ob.DSN, func(c *pgxpool.Config) {
		c.ConnConfig.User = "relay"
		c.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
			asked.Add(1)
			cc.Password, _ = password.Load().(string)
			return nil
		}
	})
	r := newReader(t, pool)
	r.subscribe(t, "reader", s, ackAll)
	ob.probe(t, s, 15*time.Second)

	password.Store("second")
	ob.Exec(`ALTER ROLE relay PASSWORD 'second'`)
	before := asked.Load()
	ended := outboxtest.Ask[int](ob.Outbox, "SELECT count(pg_terminate_backend(pid))::int FROM pg_stat_activity WHERE usename = 'relay'")
	if ended == 0 {
		t.Fatal("the trap is none: there was no session to end")
	}
	ob.probe(t, s, 15*time.Second)
	if asked.Load() == before {
		t.Error("the password was not asked for again")
	}
	r.close(t)
	ob.judge(t, s)
}
