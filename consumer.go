package pgoutbox

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"
)

// consumer is a group reading one topic, or all of them, as the database knows it.
type consumer struct {
	id      int64
	group   string
	topic   string
	shards  int
	startAt any // nil, or microseconds since 1970: rows of the first batch that are older are skipped
}

// StartPosition says where a new consumer begins. It counts once, when the consumer is first created; an existing one goes
// on where it stands. The zero value is Earliest.
type StartPosition struct {
	latest bool
	at     time.Time
}

// Earliest and Latest are where a consumer can start.
var (
	// Earliest starts with the oldest row that is still in the table.
	Earliest StartPosition
	// Latest skips the rows that are visible when the consumer is created. A row whose transaction is still open then is
	// not among them: it is delivered, whatever its id.
	Latest = StartPosition{latest: true}
)

// StartAt skips the rows that are visible when the consumer is created and were inserted before t, by the server's clock.
func StartAt(t time.Time) StartPosition { return StartPosition{at: t} }

const defaultShards = 16

// inspect finds out what would keep the session from leading anything.
func (g *leadership) inspect(ctx context.Context, s *session) error {
	row, err := s.ask(ctx, g.queries.check)
	if hasCode(err, codeInsufficientPrivilege) {
		return permanent(fmt.Errorf("GRANT USAGE ON SCHEMA %s to the role of the lock session: %w", quoteIdentifier(g.names.schema), err))
	}
	if err != nil {
		return fmt.Errorf("check the schema: %w", err)
	}
	switch {
	case row[1] == "t":
		return errors.New("the server is in recovery: it is a standby; locks there exclude nobody on the primary")
	case row[2] != "":
		return permanent(fmt.Errorf("%s missing: run Migrate", row[2]))
	case row[3] != "1":
		return permanent(fmt.Errorf("the sequence of %s caches %s ids, so ids do not ascend in causal order: ALTER SEQUENCE %s CACHE 1",
			g.names.quoted(""), row[3], g.names.quoted("_id_seq")))
	case row[4] != "":
		return permanent(fmt.Errorf("the role of the lock session lacks rights: GRANT %s", row[4]))
	}
	return g.checkServer(ctx, s)
}

func (g *leadership) reportOnce(what string, fields map[string]any) {
	if _, told := g.lastReport[what]; !told {
		g.lastReport[what] = time.Now()
		g.report.info(what, fields)
	}
}

// ensureConsumer returns the consumer, and creates it when it is new.
func (g *leadership) ensureConsumer(ctx context.Context, s *session, group, topic string, shards int, from StartPosition) (consumer, error) {
	found, err := g.findConsumer(ctx, s, group, topic)
	if err == nil && found.id == 0 {
		if err = g.createConsumer(ctx, s, group, topic, shards, from); err == nil {
			found, err = g.findConsumer(ctx, s, group, topic)
		}
	}
	if hasCode(err, codeProgramLimit) {
		return found, permanent(fmt.Errorf("a consumer of this group, %d bytes, and topic, %d bytes: they do not fit into one index entry, "+
			"which takes about 2,700 bytes: choose a shorter name: %w", len(group), len(topic), err))
	}
	if err != nil {
		return found, fmt.Errorf("consumer of group %q, topic %q: %w", group, topic, err)
	}
	if shards != 0 && shards != found.shards {
		return found, permanent(fmt.Errorf("consumer of group %q, topic %q has %d shards, Shards says %d: the number is fixed when it is created",
			group, topic, found.shards, shards))
	}
	return found, nil
}

// findConsumer returns a consumer with id 0 when there is none.
func (g *leadership) findConsumer(ctx context.Context, s *session, group, topic string) (consumer, error) {
	out := consumer{group: group, topic: topic}
	results, err := s.roundTrip(ctx, request{sql: g.queries.consumer, args: []any{group, topic}})
	if err == nil {
		err = results[0].Err
	}
	if err != nil || len(results[0].Rows) == 0 {
		return out, err
	}
	row := results[0].Rows[0]
	if out.id, err = strconv.ParseInt(string(row[0]), 10, 64); err != nil {
		return out, permanent(fmt.Errorf("id: %w", err))
	}
	if out.shards, err = strconv.Atoi(string(row[1])); err != nil {
		return out, permanent(fmt.Errorf("shards: %w", err))
	}
	if row[2] != nil {
		at, err := strconv.ParseInt(string(row[2]), 10, 64)
		if err != nil {
			return out, permanent(fmt.Errorf("start_at: %w", err))
		}
		out.startAt = at
	}
	return out, nil
}

// createConsumer creates the consumer where from says, unless another process does so at the same time. What Latest and a
// time skip is what this session can see now: a session that never wrote a row of the outbox, so none of its own is missing.
func (g *leadership) createConsumer(ctx context.Context, s *session, group, topic string, shards int, from StartPosition) error {
	if shards == 0 {
		shards = defaultShards
	}
	at := between(sawNothing())
	var startAt any
	if from.latest || !from.at.IsZero() {
		t, err := g.look(ctx, s)
		if err != nil {
			return err
		}
		if from.latest {
			at = between(t.snapshot)
		} else {
			at = position{batch: &batch{after: sawNothing(), upto: t.snapshot}}
			startAt = from.at.UnixMicro()
		}
	}
	args := append([]any{group, topic, shards, startAt}, at.args()[:8]...)
	results, err := s.roundTrip(ctx, request{sql: g.queries.createConsumer, args: args, durable: true})
	if err != nil {
		return err
	}
	return results[0].Err
}

// look reads a tick outside the rhythm, with stray ids looked for.
func (g *leadership) look(ctx context.Context, s *session) (tick, error) {
	g.nextProbe = time.Time{}
	results, err := s.roundTrip(ctx, g.tickRequests(time.Now())...)
	if err != nil {
		return tick{}, err
	}
	return g.readTick(results)
}
