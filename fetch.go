package pgoutbox

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// fetcher reads rows for one consumer. Each read borrows a connection of the caller's pool for one round trip: nothing is
// held between pages, and none of them is seen by user code.
type fetcher struct {
	pool     *pgxpool.Pool
	replica  *replica // nil: the pool serves everything
	consumer consumer
	topics   map[string]string // a topic is one string, however many rows bear it

	window, nextID, lateXids, lateRows, byID string
}

const (
	pageRows     = 1000     // rows wanted of one page
	inlineLimit  = 32 << 10 // a larger payload is read alone, when its turn has come
	fetchTimeout = 15 * time.Second
	lateChunk    = 50_000 // index entries looked at in one statement
	lateMost     = 5_000  // transactions read one by one; more only after somebody turned the sequence back
)

func newFetcher(pool *pgxpool.Pool, n names, c consumer) *fetcher {
	return &fetcher{
		pool: pool, consumer: c, topics: map[string]string{},
		window: n.query("window"), nextID: n.query("next_id"), lateXids: n.query("late_xids"),
		lateRows: n.query("late_rows"), byID: n.query("rows_by_id"),
	}
}

// pageSettings hold for one page: rows hidden by a policy are an error, and the plan walks an index, whatever the table's
// statistics say or do not say yet. Set for the transaction, so nothing of them stays on the caller's connection.
var pageSettings = strings.Join([]string{
	"SELECT set_config('row_security', 'off', true)",
	"set_config('statement_timeout', '" + strconv.FormatInt(fetchTimeout.Milliseconds(), 10) + "', true)",
	"set_config('lock_timeout', '1000', true)",
	"set_config('client_encoding', 'UTF8', true)", // texts arrive as the bytes they are, whatever the pool asks for
	"set_config('enable_seqscan', 'off', true)",
	"set_config('enable_bitmapscan', 'off', true)",
	"set_config('enable_hashjoin', 'off', true)", // late rows are looked up one by one, or the join walks over the history
	"set_config('enable_mergejoin', 'off', true)",
	"set_config('jit', 'off', true)",
	"set_config('max_parallel_workers_per_gather', '0', true)",
}, ", ")

// beginPage is explicit: under repeatable read a table that ALTER TABLE rewrote looks empty.
const beginPage = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"

// read runs one statement in one round trip and calls each with the columns, in binary, of every row. They are valid during
// the call only.
func (f *fetcher) read(ctx context.Context, sql string, args []any, each func([][]byte) error) error {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	if f.replica.serves() {
		rows, err := f.replica.read(ctx, sql, args)
		if err == nil {
			for _, row := range rows {
				if err := each(row); err != nil {
					return err
				}
			}
			return nil
		}
		f.replica.passOver(err)
	}
	conn, err := f.pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("take a connection of the pool: %w", err)
	}
	defer conn.Release()
	return runPage(ctx, conn, pageStatements(sql, args), func(statement int, values [][]byte) error {
		if statement != pageItself {
			return nil
		}
		return each(values)
	})
}

// pageStatement is one statement of a page; binary says how its answer comes.
type pageStatement struct {
	sql    string
	args   []any
	binary bool
}

const pageItself = 2 // among pageStatements

func pageStatements(sql string, args []any) []pageStatement {
	return []pageStatement{{sql: beginPage}, {sql: pageSettings}, {sql: sql, args: args, binary: true}, {sql: "COMMIT"}}
}

// runPage sends the statements in one round trip, and calls each with the columns of every row of each.
func runPage(ctx context.Context, conn *pgxpool.Conn, statements []pageStatement, each func(int, [][]byte) error) error {
	pipeline := conn.Conn().PgConn().StartPipeline(ctx)
	for _, s := range statements {
		var formats []int16
		if s.binary {
			formats = []int16{1}
		}
		pipeline.SendQueryParams(s.sql, textArgs(s.args), nil, nil, formats)
	}
	if err := pipeline.Sync(); err != nil {
		return errors.Join(err, pipeline.Close())
	}
	err := readPage(pipeline, len(statements), each)
	if closed := pipeline.Close(); err == nil {
		err = closed
	}
	return err
}

func readPage(pipeline *pgconn.Pipeline, statements int, each func(int, [][]byte) error) error {
	var bad error
	for statement := range statements {
		got, err := pipeline.GetResults()
		if err != nil {
			return err
		}
		rows, ok := got.(*pgconn.ResultReader)
		if !ok {
			return fmt.Errorf("statement %d of a page has no answer", statement)
		}
		for rows.NextRow() {
			if bad == nil {
				bad = each(statement, rows.Values())
			}
		}
		if _, err := rows.Close(); err != nil {
			return err
		}
	}
	return bad
}

// filter is what a scan reads of a batch: which shards, and what the first batch of a consumer that starts at a time skips.
type filter struct {
	shards  any // nil = all
	startAt any
}

func (f *fetcher) topic() any {
	if f.consumer.topic == AllTopics {
		return nil
	}
	return f.consumer.topic
}

// readWindow returns the first rows of the ids in (from, to], by id.
func (f *fetcher) readWindow(ctx context.Context, b *batch, from, to int64, limit int, by filter) ([]*entry, error) {
	oldest := b.after.xmax
	if len(b.after.running) > 0 {
		oldest = b.after.running[0]
	}
	return f.rows(ctx, f.window, from, to, f.topic(), by.shards, f.consumer.shards, by.startAt, inlineLimit,
		b.after.high, strconv.FormatUint(oldest, 10), limit)
}

// readNextID returns the lowest id in (from, to], 0 when there is none.
func (f *fetcher) readNextID(ctx context.Context, from, to int64) (id int64, err error) {
	err = f.read(ctx, f.nextID, []any{from, to}, func(columns [][]byte) error {
		if columns[0] != nil {
			id = int64(binary.BigEndian.Uint64(columns[0]))
		}
		return nil
	})
	return id, err
}

// readLateXids returns the transactions that ended between the two snapshots of the batch and may have left rows at or below
// its lower mark; all is false when there are too many to read one by one.
func (f *fetcher) readLateXids(ctx context.Context, b *batch) (xids []uint64, all bool, err error) {
	xids = b.finished()
	below := b.upto.xmax
	if b.crosses() {
		below = math.MaxUint64 // of the server before: all that is left of it has ended
	}
	if b.after.low == 0 || b.after.xmax >= below {
		return xids, true, nil
	}
	fromXid, fromID := b.after.xmax-1, int64(math.MaxInt64)
	seen := map[uint64]bool{}
	for more := true; more; {
		more = false
		args := []any{strconv.FormatUint(fromXid, 10), fromID, strconv.FormatUint(below, 10), b.after.low, lateChunk, b.after.first}
		err := f.read(ctx, f.lateXids, args, func(columns [][]byte) error {
			fromXid = binary.BigEndian.Uint64(columns[0])
			fromID = int64(binary.BigEndian.Uint64(columns[1]))
			more = int(binary.BigEndian.Uint64(columns[2])) == lateChunk
			for text := range strings.SplitSeq(string(columns[3]), ",") {
				if text == "" {
					continue
				}
				xid, err := strconv.ParseUint(text, 10, 64)
				if err != nil {
					return fmt.Errorf("late transaction: %w", err)
				}
				if (b.crosses() || b.upto.sees(xid)) && !seen[xid] {
					seen[xid] = true
					xids = append(xids, xid)
				}
			}
			return nil
		})
		if err != nil {
			return nil, false, err
		}
		if len(xids) > lateMost {
			return nil, false, nil
		}
	}
	return xids, true, nil
}

// readLate returns the next rows, by id above from, of late transactions, and how far it looked: up to the mark when fewer
// than limit were there.
func (f *fetcher) readLate(ctx context.Context, b *batch, xids []uint64, from int64, limit int, by filter) ([]*entry, int64, error) {
	list := make([]int64, len(xids))
	for i, xid := range xids {
		list[i] = int64(xid)
	}
	rows, err := f.rows(ctx, f.lateRows, list, from, b.after.low, limit, f.topic(), by.shards, f.consumer.shards, by.startAt, inlineLimit)
	if err != nil {
		return nil, 0, err
	}
	to := b.after.low
	if len(rows) == limit {
		to = rows[len(rows)-1].id
	}
	wanted := rows[:0]
	for _, e := range rows {
		if e.xid != 0 {
			wanted = append(wanted, e)
		}
	}
	return wanted, to, nil
}

// readByID reads rows again. Payloads over the limit are left out.
func (f *fetcher) readByID(ctx context.Context, ids []int64, limit int) (map[int64]*entry, error) {
	rows, err := f.rows(ctx, f.byID, ids, limit)
	if err != nil {
		return nil, err
	}
	out := make(map[int64]*entry, len(rows))
	for _, e := range rows {
		out[e.id] = e
	}
	return out, nil
}

func (f *fetcher) rows(ctx context.Context, sql string, args ...any) ([]*entry, error) {
	var out []*entry
	err := f.read(ctx, sql, args, func(columns [][]byte) error {
		e, err := f.decode(columns)
		out = append(out, e)
		return err
	})
	return out, err
}

// decode copies a row out of the connection's buffer: one string holds all its texts. A row with its id alone was not wanted
// by the filter.
func (f *fetcher) decode(columns [][]byte) (*entry, error) {
	if len(columns) != 10 || len(columns[0]) != 8 {
		return nil, errors.New("a row has an unexpected shape")
	}
	e := &entry{}
	e.id = int64(binary.BigEndian.Uint64(columns[0]))
	if columns[1] == nil {
		return e, nil
	}
	e.xid = binary.BigEndian.Uint64(columns[1])
	e.slot = int(binary.BigEndian.Uint16(columns[2]))
	e.created = fromServerTime(int64(binary.BigEndian.Uint64(columns[3])))
	e.topic = f.intern(columns[4])
	key, uuid, metadata := columns[5], columns[6], columns[7]
	if len(metadata) == 0 || metadata[0] != 1 {
		return nil, fmt.Errorf("metadata of row %d is in an unknown format", e.id)
	}
	metadata = metadata[1:] // jsonb's version
	text := string(append(append(append(make([]byte, 0, len(key)+len(uuid)+len(metadata)), key...), uuid...), metadata...))
	e.key, text, e.hasKey = text[:len(key)], text[len(key):], key != nil
	e.uuid, e.metadata = text[:len(uuid)], text[len(uuid):]
	e.size = int(binary.BigEndian.Uint32(columns[8]))
	if columns[9] != nil {
		e.payload = append(make([]byte, 0, len(columns[9])), columns[9]...)
		e.loaded = true
	}
	return e, nil
}

func (f *fetcher) intern(topic []byte) string {
	if known, ok := f.topics[string(topic)]; ok {
		return known
	}
	if len(f.topics) > 10_000 {
		clear(f.topics)
	}
	fresh := string(topic)
	f.topics[fresh] = fresh
	return fresh
}

// fromServerTime reads a timestamptz: microseconds since 2000.
func fromServerTime(micros int64) time.Time {
	const from1970 = 946_684_800 * 1_000_000
	if micros > math.MaxInt64-from1970 {
		return time.Time{} // infinity
	}
	return time.UnixMicro(micros + from1970).UTC()
}
