package outboxtest

import (
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// historySQL keeps every state that a cursor row ever had, in order.
const historySQL = `
CREATE TABLE cursor_log (LIKE outbox_cursors);
ALTER TABLE cursor_log ADD COLUMN n bigint GENERATED ALWAYS AS IDENTITY;
CREATE FUNCTION log_cursor() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO public.cursor_log VALUES (NEW.*);
	RETURN NULL;
END $$;
CREATE TRIGGER log_cursor AFTER UPDATE ON outbox_cursors FOR EACH ROW EXECUTE FUNCTION log_cursor();`

// Cursor is a stored position of one shard.
type Cursor struct {
	Consumer int64
	Shard    int
	Term     int64
	Upto     Snapshot // of the batch; between batches of the last one
	Last     int64    // math.MaxInt64 between batches
	Before   int64    // the high mark of the batch before
	Pending  []int64
}

// Snapshot is what a batch may read up to.
type Snapshot struct {
	Epoch           int // of the server whose transaction ids these are
	Low, High, Xmax int64
	Running         []int64 // transactions, of those below Xmax
	text            string
}

// An idle cursor is compared by what it will read from next, so both forms of a row come out as one.
const cursorColumns = `consumer_id, shard, term, coalesce(upto_epoch, after_epoch), coalesce(upto_low, after_low), coalesce(upto_high, after_high),
	coalesce(upto_snapshot, after_snapshot)::text, upto_snapshot IS NULL, last_id, pending, after_high`

func scanCursor(row pgx.CollectableRow) (Cursor, error) {
	var c Cursor
	var between bool
	err := row.Scan(&c.Consumer, &c.Shard, &c.Term, &c.Upto.Epoch, &c.Upto.Low, &c.Upto.High, &c.Upto.text,
		&between, &c.Last, &c.Pending, &c.Before)
	if err != nil {
		return c, err
	}
	if between {
		c.Last = math.MaxInt64
	}
	parts := strings.Split(c.Upto.text, ":")
	if c.Upto.Xmax, err = strconv.ParseInt(parts[1], 10, 64); err != nil {
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
		c.Upto.Running = append(c.Upto.Running, xid)
	}
	return c, nil
}

// KeepHistory keeps every state that a stored position has from now on, in the table cursor_log, for [Outbox.MustNotGoBack].
func (o *Outbox) KeepHistory() {
	o.Helper()
	o.Exec(historySQL)
}

// Cursors returns the stored positions in the order of shards.
func (o *Outbox) Cursors() []Cursor {
	o.Helper()
	return o.readCursors("SELECT " + cursorColumns + " FROM outbox_cursors ORDER BY consumer_id, shard")
}

func (o *Outbox) readCursors(sql string) []Cursor {
	o.Helper()
	rows, _ := o.Pool.Query(o.Context(), sql) // CollectRows tells the error
	out, err := pgx.CollectRows(rows, scanCursor)
	o.Must(err)
	return out
}

// Past reports whether a row that committed before the batches here were begun lies at or before the position.
func (c Cursor) Past(id int64) bool { return c.Before >= id || (c.Upto.High >= id && c.Last >= id) }

// MustNotGoBack fails the test if a position was ever stored after a later one (CURSOR-MONO), and returns how many it compared.
func (o *Outbox) MustNotGoBack() int {
	o.Helper()
	type place struct {
		consumer int64
		shard    int
	}
	before := map[place]Cursor{}
	all := o.readCursors("SELECT " + cursorColumns + " FROM cursor_log ORDER BY n")
	for _, c := range all {
		at := place{c.Consumer, c.Shard}
		if b, ok := before[at]; ok && !c.follows(b) {
			o.Errorf("CURSOR-MONO: shard %d of consumer %d went back from %+v to %+v", c.Shard, c.Consumer, b, c)
		}
		before[at] = c
	}
	return len(all)
}

// follows reports whether c may be stored after b. The last id may go back when a new batch begins with late rows.
func (c Cursor) follows(b Cursor) bool {
	if c.Term < b.Term {
		return false
	}
	if c.Upto.Epoch == b.Upto.Epoch && c.Upto.text == b.Upto.text && c.Upto.Low == b.Upto.Low && c.Upto.High == b.Upto.High {
		return c.Last >= b.Last
	}
	return c.Upto.follows(b.Upto)
}

// follows reports whether s saw everything that b saw.
func (s Snapshot) follows(b Snapshot) bool {
	if s.Epoch != b.Epoch { // then the numbers of transactions say nothing
		return s.Epoch > b.Epoch && s.Low >= b.Low && s.High >= b.High
	}
	if s.Low < b.Low || s.High < b.High || s.Xmax < b.Xmax {
		return false
	}
	for _, xid := range s.Running {
		if xid < b.Xmax && !slices.Contains(b.Running, xid) {
			return false
		}
	}
	return true
}
