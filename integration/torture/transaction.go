package torture

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// transaction carries out a plan on a connection. The statements that open and end it are sent as text, because pgx.Tx
// knows no PREPARE TRANSACTION.
type transaction struct {
	load *Workload
	conn *pgx.Conn
	plan plan
}

// errRolledBack is a COMMIT that the server answered with ROLLBACK, which it does after an error in the transaction.
var errRolledBack = errors.New("commit ended in a rollback")

// run writes the transaction and ends it. An error leaves open whether it committed: the ledger knows.
func (t *transaction) run(ctx context.Context) error {
	messages, err := t.write(ctx)
	if err != nil {
		return err
	}
	if err := pause(ctx, t.plan.afterPut); err != nil {
		return err
	}
	switch t.plan.end {
	case commit, ends: // below
	case rollback:
		_, err = t.conn.Exec(ctx, "ROLLBACK")
		return err
	case prepareCommit, prepareRollback:
		if t.load.finisher.reserve() {
			return t.prepare(ctx, messages)
		}
		t.plan.end = commit // every slot for prepared transactions is taken
	}
	tag, err := t.conn.Exec(ctx, "COMMIT")
	if err != nil {
		return err
	}
	if tag.String() != "COMMIT" {
		return errRolledBack
	}
	t.load.history.committed(messages)
	return nil
}

// prepare leaves the transaction to the finisher. It does so after an error too: the server may have prepared it and
// crashed before it could say so, and then the key's lock would be held for ever.
func (t *transaction) prepare(ctx context.Context, messages []Message) error {
	gid := fmt.Sprintf("torture-%d", t.load.nextID())
	_, err := t.conn.Exec(ctx, "PREPARE TRANSACTION '"+gid+"'")
	t.load.finisher.hand(prepared{
		gid:      gid,
		messages: messages,
		commit:   t.plan.end == prepareCommit,
		due:      t.load.history.now() + t.plan.preparedFor,
	})
	return err
}

// write does everything between BEGIN and the end, and returns the messages that a commit makes real.
func (t *transaction) write(ctx context.Context) ([]Message, error) {
	if _, err := t.conn.Exec(ctx, "BEGIN"); err != nil {
		return nil, err
	}
	if t.plan.early {
		if _, err := t.conn.Exec(ctx, "INSERT INTO torture_elsewhere DEFAULT VALUES"); err != nil {
			return nil, err
		}
		if err := pause(ctx, t.plan.afterEarly); err != nil {
			return nil, err
		}
	}
	messages, err := t.lockKeys(ctx)
	if err != nil {
		return nil, err
	}
	if err := pause(ctx, t.plan.afterLock); err != nil {
		return nil, err
	}
	if err := t.nested(ctx, messages); err != nil {
		return nil, err
	}
	if t.plan.lock == forUpdate && t.plan.late {
		if err := t.raise(ctx, messages); err != nil {
			return nil, err
		}
	}
	return messages, nil
}

// nested writes the messages with the savepoint that the plan wants around them.
func (t *transaction) nested(ctx context.Context, messages []Message) error {
	if t.plan.nest == flat {
		return t.put(ctx, messages)
	}
	if _, err := t.conn.Exec(ctx, "SAVEPOINT nested"); err != nil {
		return err
	}
	if t.plan.nest == released {
		if err := t.put(ctx, messages); err != nil {
			return err
		}
		_, err := t.conn.Exec(ctx, "RELEASE SAVEPOINT nested")
		return err
	}
	doomed := make([]Message, len(messages))
	for i, m := range messages {
		m.ID = t.load.nextID()
		doomed[i] = m
	}
	if err := t.put(ctx, doomed); err != nil {
		return err
	}
	if _, err := t.conn.Exec(ctx, "ROLLBACK TO SAVEPOINT nested"); err != nil {
		return err
	}
	return t.put(ctx, messages)
}
