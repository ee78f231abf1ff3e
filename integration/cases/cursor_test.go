package cases_test

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// logCursors keeps every state that a cursor row ever had, in order.
const logCursors = `
CREATE TABLE cursor_log AS SELECT * FROM outbox_cursors WITH NO DATA;
ALTER TABLE cursor_log ADD COLUMN n bigint GENERATED ALWAYS AS IDENTITY;
CREATE FUNCTION log_cursor() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.cursor_log VALUES (NEW.*);
	RETURN NULL;
END $$;
CREATE TRIGGER log_cursor AFTER UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION log_cursor();`

// cursor is a stored position of one shard.
type cursor struct {
	consumer int64
	shard    int
	term     int64
	upto     snapshot // of the batch; between batches of the last one
	last     int64    // math.MaxInt64 between batches
	pending  []int64
}

type snapshot struct {
	low, high, xmax int64
	running         []int64
	text            string
}

// An idle cursor is compared by what it will read from next, so both forms of a row come out as one.
const cursorColumns = `consumer_id, shard, term, coalesce(upto_low, after_low), coalesce(upto_high, after_high),
	coalesce(upto_snapshot, after_snapshot)::text, upto_snapshot IS NULL, last_id, pending`

func scanCursor(row pgx.CollectableRow) (cursor, error) {
	var c cursor
	var between bool
	if err := row.Scan(&c.consumer, &c.shard, &c.term, &c.upto.low, &c.upto.high, &c.upto.text, &between, &c.last, &c.pending); err != nil {
		return c, err
	}
	if between {
		c.last = math.MaxInt64
	}
	parts := strings.Split(c.upto.text, ":")
	var err error
	if c.upto.xmax, err = strconv.ParseInt(parts[1], 10, 64); err != nil {
		return c, err
	}
	for one := range strings.SplitSeq(parts[2], ",") {
		if one == "" {
			continue
		}
		xid, err := strconv.ParseInt(one, 10, 64)
		if err != nil {
			return c, err
		}
		c.upto.running = append(c.upto.running, xid)
	}
	return c, nil
}

// cursors returns the stored positions in the order of shards.
func (ob *outbox) cursors(t testing.TB) []cursor {
	t.Helper()
	return ob.readCursors(t, "SELECT "+cursorColumns+" FROM outbox_cursors ORDER BY consumer_id, shard")
}

func (ob *outbox) readCursors(t testing.TB, sql string) []cursor {
	t.Helper()
	rows, _ := ob.pool.Query(t.Context(), sql) // CollectRows tells the error
	out, err := pgx.CollectRows(rows, scanCursor)
	must(t, err)
	return out
}

// awaitPending waits until the one shard's stored position is past a row and lists exactly these rows as pending.
func (ob *outbox) awaitPending(t testing.TB, past int64, pending ...int64) {
	t.Helper()
	eventually(t, 10*time.Second, fmt.Sprintf("the stored position is past row %d and keeps %v", past, pending), func() (bool, string) {
		c := ob.cursors(t)[0]
		return c.past(past) && slices.Equal(c.pending, pending), fmt.Sprintf("%+v", c)
	})
}

// past reports whether a row that committed before the batch was begun lies at or before the position.
func (c cursor) past(id int64) bool { return c.upto.high >= id && c.last >= id }

// mustBeMonotonous demands that no position was ever stored after a later one: CURSOR-MONO.
func (ob *outbox) mustBeMonotonous(t testing.TB) {
	t.Helper()
	type place struct {
		consumer int64
		shard    int
	}
	before := map[place]cursor{}
	for _, c := range ob.readCursors(t, "SELECT "+cursorColumns+" FROM cursor_log ORDER BY n") {
		at := place{c.consumer, c.shard}
		if b, ok := before[at]; ok && !c.follows(b) {
			t.Errorf("CURSOR-MONO: shard %d of consumer %d went back from %+v to %+v", c.shard, c.consumer, b, c)
		}
		before[at] = c
	}
}

func (c cursor) follows(b cursor) bool {
	if c.term < b.term {
		return false
	}
	if c.upto.text == b.upto.text && c.upto.low == b.upto.low && c.upto.high == b.upto.high {
		return c.last >= b.last
	}
	return c.upto.follows(b.upto)
}

// follows reports whether s saw everything that b saw.
func (s snapshot) follows(b snapshot) bool {
	if s.low < b.low || s.high < b.high || s.xmax < b.xmax {
		return false
	}
	for _, xid := range s.running {
		if xid < b.xmax && !slices.Contains(b.running, xid) {
			return false
		}
	}
	return true
}
