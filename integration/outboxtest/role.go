package outboxtest

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// Setting gives every session of a pool a setting, application_name for one.
func Setting(name, value string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams[name] = value }
}

var roles atomic.Int64

// Role creates a role that may do nothing, and returns its name and a pool whose sessions are that role. Roles are the whole
// server's, so the name tells the process too.
func (o *Outbox) Role(mod ...func(*pgxpool.Config)) (string, *pgxpool.Pool) {
	o.Helper()
	name := fmt.Sprintf("pgoutbox_role_%d_%d", os.Getpid(), roles.Add(1))
	o.Exec("CREATE ROLE " + name + " NOSUPERUSER NOBYPASSRLS")
	o.Exec("REVOKE CREATE ON SCHEMA public FROM PUBLIC") // as from version 15 on
	o.Cleanup(func() {
		if _, err := o.Pool.Exec(context.WithoutCancel(o.Context()), "DROP OWNED BY "+name+"; DROP ROLE "+name); err != nil {
			o.Error(err)
		}
	})
	return name, pgserver.Pool(o.TB, o.DSN, append(mod, Setting("role", name))...)
}
