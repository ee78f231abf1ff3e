package pgoutbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// session is one connection to the server itself. It holds every shard lock of its Subscriber, Bridge or Leader, and the
// server frees them when it ends. One goroutine uses it. After any doubt about what the server did it is thrown away,
// locks and all: a lock that nobody tracks is worse than a lost one.
type session struct {
	conn   *pgx.Conn
	token  string
	lease  string // how the server writes the lease it granted
	sync   string // the synchronous_commit of what must not be taken back by a crash
	limits limits
	proved bool // answered a poll

	prepared   map[string]string // names of the statements that were prepared, by text
	statements int
}

// limits are the times that bound a session.
type limits struct {
	lease time.Duration
}

// statement bounds each statement, on both sides of the wire. The floor keeps a short lease from dropping a healthy lock
// because of one slow answer.
func (l limits) statement() time.Duration { return max(2*time.Second, l.lease/4) }

// lockWait is how long a statement may wait for somebody's table lock: a tick behind an ALTER TABLE must be given up while
// there is still time to show that the session lives.
func (l limits) lockWait() time.Duration {
	return min(max(l.lease/8, 100*time.Millisecond), time.Second)
}

// roundTrip is how long the client waits for the answers to so many statements. Behind a table lock each of them may wait as
// long as it may; giving up sooner would cost the session, and every lead with it, over somebody's migration. Later than
// the trust would end it is of no use.
func (l limits) roundTrip(statements int) time.Duration {
	each := l.statement() + time.Duration(statements)*l.lockWait()
	return max(l.statement()+l.lockWait(), min(each, l.lease-l.margin()))
}

// margin is how much earlier than the server the client stops trusting its leadership.
func (l limits) margin() time.Duration { return max(l.lease/10, 200*time.Millisecond) }

// keepAlive is the longest pause between two statements.
func (l limits) keepAlive() time.Duration { return l.lease / 4 }

// openSession connects and proves, before any lock is taken, that the connection is what it must be: it ends with the server
// process that answered first (no pooler in between), and the server ends it when it hears nothing for the lease.
func openSession(ctx context.Context, dial func(context.Context) (*pgx.Conn, error), l limits, pooled bool) (*session, error) {
	conn, err := dial(ctx)
	if err != nil {
		return nil, fmt.Errorf("connect the lock session: %w", err)
	}
	s := &session{conn: conn, token: rand.Text(), limits: l, prepared: map[string]string{}}
	if err := s.setUp(ctx, pooled); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// closeTimeout bounds the goodbye; a server that does not answer frees the locks when the socket closes.
const closeTimeout = 500 * time.Millisecond

func (s *session) close() {
	// The session is closed because its context has ended, so the goodbye cannot run on it.
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = s.conn.Close(ctx) // closed either way; the locks go with it
}

// setting is one run-time parameter of a session. An optional one may be missing on this server or platform.
type setting struct {
	name, value string
	optional    bool
}

func (s *session) settings() []setting {
	ms := func(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }
	seconds := func(d time.Duration) string { return strconv.FormatInt(max(1, int64(d/time.Second)), 10) }
	l := s.limits
	return []setting{
		{name: "pgoutbox.session", value: s.token},
		{name: "idle_session_timeout", value: ms(l.lease)}, // a holder that falls silent loses its locks
		{name: "statement_timeout", value: ms(l.statement())},
		{name: "lock_timeout", value: ms(l.lockWait())},
		{name: "idle_in_transaction_session_timeout", value: ms(l.lease)},
		{name: "default_transaction_isolation", value: "read committed"}, // under repeatable read a rewritten table is empty
		{name: "default_transaction_read_only", value: "off"},
		{name: "default_transaction_deferrable", value: "off"},
		{name: "row_security", value: "off"}, // an error instead of rows that silently are not there
		{name: "client_encoding", value: "UTF8"},
		{name: "array_nulls", value: "on"}, // or a position with a NULL in it could not be stored
		{name: "synchronous_commit", value: "off"},
		{name: "client_connection_check_interval", value: ms(max(l.keepAlive(), time.Second)), optional: true},
		{name: "transaction_timeout", value: ms(l.statement() + l.lease), optional: true}, // PostgreSQL 17
		{name: "tcp_keepalives_idle", value: seconds(l.lease / 2), optional: true},
		{name: "tcp_keepalives_interval", value: seconds(l.lease / 6), optional: true},
		{name: "tcp_keepalives_count", value: "3", optional: true},
		{name: "tcp_user_timeout", value: ms(l.lease), optional: true},
	}
}

// setUp sends each setting in a round trip of its own kind: a batch that fails rolls its settings back, but would keep a
// lock that it took.
func (s *session) setUp(ctx context.Context, pooled bool) error {
	first, err := s.ask(ctx, "SELECT pg_backend_pid(), current_setting('synchronous_commit'), current_setting('server_version_num')")
	if err != nil {
		return fmt.Errorf("look at the lock session: %w", err)
	}
	if first[0] != strconv.FormatUint(uint64(s.conn.PgConn().PID()), 10) && !pooled {
		return fmt.Errorf("%w: the server process that answers is not the one that was connected to. Set LockConn to a DSN that "+
			"leads to the server itself, or AllowPooler if the pooler is in session mode", ErrPooledConnection)
	}
	if version, _ := strconv.Atoi(first[2]); version < minServerVersion {
		return permanent(fmt.Errorf("the server is PostgreSQL %d, this needs %d or newer", version/10000, minServerVersion/10000))
	}
	if s.sync = first[1]; s.sync == "off" {
		s.sync = "on"
	}
	settings := s.settings()
	requests := make([]request, len(settings))
	for i, one := range settings {
		requests[i] = request{sql: "SELECT set_config($1, $2, false)", args: []any{one.name, one.value}}
	}
	results, err := s.roundTrip(ctx, requests...)
	if err != nil {
		return fmt.Errorf("configure the lock session: %w", err)
	}
	for i, result := range results {
		if result.Err != nil && !settings[i].optional {
			return fmt.Errorf("set %s on the lock session: %w", settings[i].name, result.Err)
		}
	}
	granted, err := s.ask(ctx, `SELECT coalesce(current_setting('pgoutbox.session', true), ''),
		(SELECT setting = $1 FROM pg_catalog.pg_settings WHERE name = 'idle_session_timeout'), current_setting('idle_session_timeout')`,
		s.limits.lease.Milliseconds())
	if err != nil {
		return fmt.Errorf("read the lock session's settings back: %w", err)
	}
	if granted[0] != s.token || granted[1] != "t" {
		return fmt.Errorf("%w: a setting that the session had just made was gone in the next statement", ErrPooledConnection)
	}
	s.lease = granted[2]
	return nil
}

const minServerVersion = 140000

// request is one statement of a round trip. A durable one commits synchronously although the session does not; a frequent one
// is prepared.
type request struct {
	sql      string
	args     []any
	durable  bool
	frequent bool
}

// roundTrip sends all requests at once and returns their answers in order. Each is a transaction of its own (a Sync after
// each: a pipeline that was sent by half then counts as idle, and one error does not undo its neighbours). An error that
// only one request met is in its result; roundTrip's own error means that the session is lost.
func (s *session) roundTrip(ctx context.Context, requests ...request) ([]*pgconn.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, s.limits.roundTrip(len(requests)))
	defer cancel()
	pipeline := s.conn.PgConn().StartPipeline(ctx)
	for _, r := range requests {
		if r.durable {
			pipeline.SendQueryParams("SELECT set_config('synchronous_commit', $1, true)", [][]byte{[]byte(s.sync)}, nil, nil, nil)
		}
		s.send(pipeline, r)
		pipeline.SendPipelineSync()
	}
	if err := pipeline.Flush(); err != nil {
		return nil, errors.Join(err, pipeline.Close())
	}
	results := make([]*pgconn.Result, len(requests))
	for i, r := range requests {
		answers := 1
		if r.durable {
			answers = 2
		}
		results[i] = readResult(pipeline, answers)
		if fatal(results[i].Err) {
			return nil, errors.Join(results[i].Err, pipeline.Close())
		}
		if results[i].Err != nil {
			delete(s.prepared, r.sql) // by what went wrong nobody knows whether it was prepared
		}
	}
	if err := pipeline.Close(); err != nil && fatal(err) {
		return nil, err
	}
	return results, nil
}

func (s *session) send(pipeline *pgconn.Pipeline, r request) {
	if !r.frequent {
		pipeline.SendQueryParams(r.sql, textArgs(r.args), nil, nil, nil)
		return
	}
	name, ok := s.prepared[r.sql]
	if !ok {
		s.statements++
		name = "pgoutbox_" + strconv.Itoa(s.statements)
		s.prepared[r.sql] = name
		pipeline.SendPrepare(name, r.sql, nil)
	}
	pipeline.SendQueryPrepared(name, textArgs(r.args), nil, nil)
}

// readResult reads up to the next Sync and returns the last answer, or the first error.
func readResult(pipeline *pgconn.Pipeline, answers int) *pgconn.Result {
	out := &pgconn.Result{}
	for {
		got, err := pipeline.GetResults()
		if err != nil {
			if out.Err == nil {
				out.Err = err
			}
			if fatal(err) {
				return out
			}
			continue
		}
		switch got := got.(type) {
		case *pgconn.ResultReader:
			if result := got.Read(); result.Err != nil {
				out.Err = errors.Join(out.Err, result.Err)
			} else if answers--; answers == 0 {
				out.Rows, out.CommandTag = result.Rows, result.CommandTag
			}
		case *pgconn.PipelineSync:
			return out
		case nil:
			out.Err = errors.Join(out.Err, errors.New("the server's answers ended early"))
			return out
		}
	}
}

// textArgs encodes arguments in PostgreSQL's text format.
func textArgs(args []any) [][]byte {
	out := make([][]byte, len(args))
	for i, arg := range args {
		switch arg := arg.(type) {
		case nil:
		case string:
			out[i] = []byte(arg)
		case int64:
			out[i] = strconv.AppendInt(nil, arg, 10)
		case int:
			out[i] = strconv.AppendInt(nil, int64(arg), 10)
		case []int64:
			out[i] = int64Array(arg)
		case []any:
			out[i] = anyArray(arg)
		}
	}
	return out
}

// anyArray is the literal of an array whose elements are quoted, but for NULL.
func anyArray(values []any) []byte {
	out := []byte{'{'}
	for i, value := range textArgs(values) {
		if i > 0 {
			out = append(out, ',')
		}
		if value == nil {
			out = append(out, "NULL"...)
			continue
		}
		out = append(out, '"')
		out = append(out, value...) // numbers, snapshots and arrays of numbers: nothing to escape
		out = append(out, '"')
	}
	return append(out, '}')
}

func int64Array(values []int64) []byte {
	out := []byte{'{'}
	for i, v := range values {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendInt(out, v, 10)
	}
	return append(out, '}')
}

// ask runs one statement and returns the columns of its first row as text, nil when it has none.
func (s *session) ask(ctx context.Context, sql string, args ...any) ([]string, error) {
	results, err := s.roundTrip(ctx, request{sql: sql, args: args})
	if err != nil {
		return nil, err
	}
	return firstRow(results[0])
}

func firstRow(result *pgconn.Result) ([]string, error) {
	if result.Err != nil || len(result.Rows) == 0 {
		return nil, result.Err
	}
	out := make([]string, len(result.Rows[0]))
	for i, value := range result.Rows[0] {
		out[i] = string(value)
	}
	return out, nil
}
