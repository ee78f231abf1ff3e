package torture

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
)

// Each locks a key, raises its version by $2 and returns the version before.
const (
	updateEntity = `UPDATE torture_entity SET version = version + $2 WHERE key = $1 RETURNING version - $2`
	upsertEntity = `
		INSERT INTO torture_entity AS e (key, version) VALUES ($1, $2)
		ON CONFLICT (key) DO UPDATE SET version = e.version + $2
		RETURNING version - $2`
)

// lockKeys locks the plan's keys in ascending order and returns its messages, numbered by their key's version.
func (t *transaction) lockKeys(ctx context.Context) ([]Message, error) {
	messages := make([]Message, len(t.plan.keys))
	for first := 0; first < len(messages); {
		key := t.plan.keys[first]
		next := first
		for next < len(messages) && t.plan.keys[next] == key {
			next++
		}
		version, err := t.lockKey(ctx, key, next-first)
		if err != nil {
			return nil, err
		}
		for i := first; i < next; i++ {
			version++
			messages[i] = Message{ID: t.load.nextID(), Key: key, Version: version}
		}
		first = next
	}
	return messages, nil
}

// lockKey locks one key for count messages and returns the version before them.
func (t *transaction) lockKey(ctx context.Context, key string, count int) (version int64, err error) {
	if key == "" {
		return 0, nil
	}
	switch t.plan.lock {
	case onConflict, locks: // below
	case forUpdate:
		err = t.conn.QueryRow(ctx, `SELECT version FROM torture_entity WHERE key = $1 FOR UPDATE`, key).Scan(&version)
		if err == nil && !t.plan.late {
			_, err = t.conn.Exec(ctx, `UPDATE torture_entity SET version = version + $2 WHERE key = $1`, key, count)
		}
	case updateReturning:
		err = t.conn.QueryRow(ctx, updateEntity, key, count).Scan(&version)
	}
	if t.plan.lock == onConflict || errors.Is(err, pgx.ErrNoRows) { // or the key's first message: there is no row to lock
		err = t.conn.QueryRow(ctx, upsertEntity, key, count).Scan(&version)
	}
	return version, err
}

// raise writes the versions of a transaction that has only locked its keys until now.
func (t *transaction) raise(ctx context.Context, messages []Message) error {
	for _, m := range messages {
		if m.Key == "" {
			continue
		}
		if _, err := t.conn.Exec(ctx, `UPDATE torture_entity SET version = $2 WHERE key = $1`, m.Key, m.Version); err != nil {
			return err
		}
	}
	return nil
}
