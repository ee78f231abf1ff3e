package torture

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// metadata is any; the readers get it back or not, the payload is what is judged.
const metadata = `{"source":"torture"}`

const insertOutbox = `INSERT INTO outbox (topic, key, uuid, metadata, payload) VALUES ($1, $2, $3, $4::jsonb, $5)`

// put writes messages into the outbox in the plan's way, and their ledger rows beside them.
func (t *transaction) put(ctx context.Context, messages []Message) error {
	var err error
	switch t.plan.put {
	case putRows:
		err = t.putRows(ctx, messages)
	case putCopy:
		err = t.putCopy(ctx, messages)
	case putPublisher:
		err = t.putPublished(ctx, messages)
	default:
		err = t.putEach(ctx, messages)
	}
	if err != nil {
		return err
	}
	return enter(ctx, t.conn, messages, false)
}

func (t *transaction) putEach(ctx context.Context, messages []Message) error {
	for _, m := range messages {
		var err error
		switch t.plan.put {
		case putFunction:
			_, err = t.conn.Exec(ctx, `SELECT outbox_publish($1, $2::jsonb, $3)`, m.topic(), string(m.payload()), m.column())
		case putCaught:
			doomed := m
			doomed.ID = t.load.nextID()
			_, err = t.conn.Exec(ctx, `SELECT torture_put_caught($1, $2, $3, $4::jsonb, $5, $6)`,
				m.topic(), m.column(), m.uuid(), metadata, m.payload(), doomed.payload())
		case putTrigger:
			_, err = t.conn.Exec(ctx, `INSERT INTO torture_change (topic, key, uuid, metadata, payload) VALUES ($1, $2, $3, $4::jsonb, $5)`,
				m.topic(), m.column(), m.uuid(), metadata, m.payload())
		default:
			_, err = t.conn.Exec(ctx, insertOutbox, m.topic(), m.column(), m.uuid(), metadata, m.payload())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *transaction) putRows(ctx context.Context, messages []Message) error {
	var (
		topics, uuids []string
		keys          []*string
		payloads      [][]byte
	)
	for _, m := range messages {
		topics, keys = append(topics, m.topic()), append(keys, m.column())
		uuids, payloads = append(uuids, m.uuid()), append(payloads, m.payload())
	}
	_, err := t.conn.Exec(ctx, `
		INSERT INTO outbox (topic, key, uuid, metadata, payload)
		SELECT topic, key, uuid, $5::jsonb, payload
		FROM unnest($1::text[], $2::text[], $3::text[], $4::bytea[]) WITH ORDINALITY AS m (topic, key, uuid, payload, n)
		ORDER BY n`, topics, keys, uuids, payloads, metadata)
	return err
}

func (t *transaction) putCopy(ctx context.Context, messages []Message) error {
	_, err := t.conn.CopyFrom(ctx, pgx.Identifier{"outbox"}, []string{"topic", "key", "uuid", "metadata", "payload"},
		pgx.CopyFromSlice(len(messages), func(i int) ([]any, error) {
			m := messages[i]
			return []any{m.topic(), m.column(), m.uuid(), []byte(metadata), m.payload()}, nil
		}))
	return err
}

// enter writes the ledger rows of messages.
func enter(ctx context.Context, conn *pgx.Conn, messages []Message, long bool) error {
	var (
		ids, versions []int64
		keys          []string
	)
	for _, m := range messages {
		ids, keys, versions = append(ids, m.ID), append(keys, m.Key), append(versions, m.Version)
	}
	_, err := conn.Exec(ctx, `
		INSERT INTO torture_ledger (message, key, version, long)
		SELECT m, k, v, $4 FROM unnest($1::bigint[], $2::text[], $3::bigint[]) AS u (m, k, v)`, ids, keys, versions, long)
	return err
}
