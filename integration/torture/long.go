package torture

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// long is a transaction that stays open for seconds, again and again. Others must not notice.
type long struct {
	name string
	open time.Duration
	run  func(context.Context, *pgx.Conn, long) error
}

func (w *Workload) longOnes() []long {
	return []long{
		{"outbox at both ends", 6 * time.Second, w.outboxAtBothEnds},
		{"no outbox", 8 * time.Second, w.noOutbox},
		{"prepared", 7 * time.Second, w.leftPrepared},
	}
}

// keepOpen runs l until until ends, at least once: a run that is shorter than l waits for it.
func (w *Workload) keepOpen(ctx, until context.Context, l long) error {
	deadline, _ := until.Deadline()
	for first := true; first || time.Until(deadline) > l.open; first = false {
		err := w.connected(ctx, until, func(conn *pgx.Conn) error {
			from := w.history.now()
			if err := l.run(ctx, conn, l); err != nil {
				return fmt.Errorf("long transaction (%s): %w", l.name, err)
			}
			w.history.stayedOpen(Span{from, w.history.now()})
			w.tally.add("long", l.name)
			return nil
		})
		if err != nil {
			return err
		}
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// outboxAtBothEnds has a row with a low id and one with a high id, and both become visible together.
func (w *Workload) outboxAtBothEnds(ctx context.Context, conn *pgx.Conn, l long) error {
	var messages []Message
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		return err
	}
	for i := range 2 {
		if i > 0 {
			if err := pause(ctx, l.open); err != nil {
				return err
			}
		}
		m, err := w.putLong(ctx, conn, "long")
		if err != nil {
			return err
		}
		messages = append(messages, m)
	}
	if _, err := conn.Exec(ctx, "COMMIT"); err != nil {
		return err
	}
	w.history.committed(messages)
	return nil
}

// noOutbox has a transaction id and holds back the server's xmin, but writes no message.
func (w *Workload) noOutbox(ctx context.Context, conn *pgx.Conn, l long) error {
	for _, statement := range []string{"BEGIN", "INSERT INTO torture_elsewhere DEFAULT VALUES"} {
		if _, err := conn.Exec(ctx, statement); err != nil {
			return err
		}
	}
	if err := pause(ctx, l.open); err != nil {
		return err
	}
	_, err := conn.Exec(ctx, "COMMIT")
	return err
}

// leftPrepared is open without a session, as after the crash of a transaction manager.
func (w *Workload) leftPrepared(ctx context.Context, conn *pgx.Conn, l long) error {
	if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
		return err
	}
	m, err := w.putLong(ctx, conn, "prepared")
	if err != nil {
		return err
	}
	gid := fmt.Sprintf("torture-long-%d", m.ID)
	_, err = conn.Exec(ctx, "PREPARE TRANSACTION '"+gid+"'")
	// Handed over after an error too: it may have been prepared, and nobody else would end it.
	p := prepared{gid: gid, messages: []Message{m}, commit: true}
	if err := pause(ctx, l.open); err != nil {
		return err
	}
	if finishErr := w.finisher.finish(ctx, p); finishErr != nil {
		return finishErr
	}
	return err
}

func (w *Workload) putLong(ctx context.Context, conn *pgx.Conn, key string) (Message, error) {
	m := Message{ID: w.nextID(), Key: key}
	if err := conn.QueryRow(ctx, upsertEntity, key, 1).Scan(&m.Version); err != nil {
		return m, err
	}
	m.Version++
	if _, err := conn.Exec(ctx, insertOutbox, m.topic(), m.column(), m.uuid(), metadata, m.payload()); err != nil {
		return m, err
	}
	return m, enter(ctx, conn, []Message{m}, true)
}
