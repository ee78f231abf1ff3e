package traps

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

const history = 100_000 // rows

func (db *outbox) addHistory() {
	db.Helper()
	// Many transactions, as a history has them.
	for range 10 {
		db.Exec(fmt.Sprintf("INSERT INTO outbox (topic, key, uuid) SELECT 't', 'k', 'old' FROM generate_series(1, %d)", history/10))
	}
	db.Exec("ANALYZE outbox")
}

// A transaction that commits late is found by its id, on top of any history: what that costs does not depend on the history.
func TestLateRowsCostTheirOwnNumber(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.addHistory()
	cfg := inOrder()
	cfg.StartFrom = pgoutbox.Latest

	late := db.Begin()
	first, _ := db.newPool()
	r := db.receive(first, cfg, nil)
	db.put(late, "late 1", "late 2")
	rows := numbered("row", 500)
	db.put(db.Pool, rows...)
	r.exactly(rows...)
	r.close()
	first.Close() // its sessions report what they read when they end
	before := db.rowsRead()

	db.Commit(late)
	second, _ := db.newPool()
	r = db.receive(second, cfg, nil)
	r.until("late 1", "late 2")
	r.close()
	second.Close()
	if read := db.rowsRead() - before; read == 0 || read > 100 {
		t.Errorf("to find 2 late rows, %d rows of the table or its indexes were read", read)
	}
}

// rowsRead is how many rows of the outbox, and entries of its indexes, ended sessions have read.
func (db *outbox) rowsRead() int64 {
	db.Helper()
	db.Eventually("only this session is left", "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database() AND (application_name LIKE 'reader %' OR "+outboxtest.IsLockSession+")")
	const read = `
		SELECT (seq_tup_read + (SELECT sum(idx_tup_read) FROM pg_stat_all_indexes AS i WHERE i.relid = t.relid))::bigint
		FROM pg_stat_all_tables AS t
		WHERE relid = 'outbox'::regclass`
	if outboxtest.Ask[string](db.Outbox, "SHOW server_version_num") < "150000" {
		// A process of its own collects what sessions report, and writes it down every half second.
		outboxtest.Pause(db.Context(), 2*time.Second)
	}
	return db.number(read)
}

// The plans of the two statements that find late rows touch what they return and no more, with the plan that fits any
// arguments as with one for these, before and after the table was analyzed. One predicate for the whole batch, which says the
// same, walks over the history.
func TestLateRowsAreReadThroughTheIndex(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	db.addHistory()
	late := db.Begin()
	db.put(late, "late 1", "late 2")
	xid, low := db.openXid(late), db.number("SELECT last_value FROM outbox_id_seq")
	db.Commit(late)
	db.put(db.Pool, numbered("row", 50)...)
	upto := db.xid(0)

	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, setting := range []string{"enable_seqscan", "enable_bitmapscan", "enable_hashjoin", "enable_mergejoin", "jit"} { // as for every page
		db.ExecOn(conn, "SET "+setting+" = off")
	}
	one, xids := fmt.Sprint(xid), fmt.Sprintf("'{%d}'", xid)
	statements := map[string]struct {
		sql  string
		args []string
		most int64
	}{
		"late_rows":                   {query(t, "late_rows"), []string{xids, "0", fmt.Sprint(low), "1000", "NULL", "NULL", "1", "NULL", "32768"}, 30},
		"late_xids":                   {query(t, "late_xids"), []string{"'" + fmt.Sprint(xid-1) + "'", "9223372036854775807", fmt.Sprintf("'%d'", upto), fmt.Sprint(low), "50000", "1"}, 300},
		"late_xids of another server": {query(t, "late_xids"), []string{"'" + fmt.Sprint(xid-1) + "'", "9223372036854775807", "'18446744073709551615'", fmt.Sprint(low), "50000", "1"}, 300},
		"combined": {`SELECT * FROM outbox
			WHERE (id > $1::bigint OR xid = ANY ($2::xid8[]) OR xid >= $3::xid8) AND id <= $1::bigint + 1000
			ORDER BY id LIMIT 1000`, []string{fmt.Sprint(low), xids, "'" + one + "'"}, -1},
	}
	for _, mode := range []string{"force_generic_plan", "force_custom_plan"} {
		for name, s := range statements {
			db.ExecOn(conn, "SET plan_cache_mode = "+mode)
			read := db.explain(conn.Conn(), s.sql, s.args)
			if s.most < 0 {
				if mode == "force_generic_plan" && read < history {
					t.Errorf("%s: the trap is none: %s read %d rows", mode, name, read)
				}
				continue
			}
			if read > s.most {
				t.Errorf("%s: %s read %d rows, more than %d", mode, name, read, s.most)
			}
		}
	}
}

// query is one statement of the library, with the settings of a page left to the server's defaults.
func query(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "internal", "queries", name+".sql"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimRight(strings.TrimSpace(string(text)), ";")
}

// explain runs a statement and returns how many rows its scans of the outbox looked at.
func (db *outbox) explain(conn *pgx.Conn, sql string, args []string) int64 {
	db.Helper()
	db.ExecOn(conn, "PREPARE explained AS "+sql)
	defer db.ExecOn(conn, "DEALLOCATE explained")
	var plan string
	err := conn.QueryRow(db.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE explained ("+strings.Join(args, ", ")+")",
		pgx.QueryExecModeSimpleProtocol).Scan(&plan)
	if err != nil {
		db.Fatal(err)
	}
	var explained []struct{ Plan node }
	if err := json.Unmarshal([]byte(plan), &explained); err != nil {
		db.Fatal(err)
	}
	return explained[0].Plan.scanned()
}

// node is one step of a plan.
type node struct {
	Type     string  `json:"Node Type"`
	Rows     float64 `json:"Actual Rows"`
	Removed  float64 `json:"Rows Removed by Filter"`
	Recheck  float64 `json:"Rows Removed by Index Recheck"`
	Loops    float64 `json:"Actual Loops"`
	Children []node  `json:"Plans"`
}

func (n node) scanned() (rows int64) {
	if strings.Contains(n.Type, "Scan") && n.Type != "Function Scan" && n.Type != "CTE Scan" && n.Type != "Subquery Scan" {
		rows = int64((n.Rows + n.Removed + n.Recheck) * n.Loops)
	}
	for _, child := range n.Children {
		rows += child.scanned()
	}
	return rows
}

// Every statement is valid as it stands, and its comment numbers its parameters.
func TestEveryStatementPreparesAndNamesItsParameters(t *testing.T) {
	t.Parallel()
	db := newOutbox(t)
	files, err := filepath.Glob("../../internal/queries/*.sql")
	if err != nil || len(files) < 20 {
		t.Fatalf("%d statements, %v", len(files), err)
	}
	conn, err := pgx.Connect(t.Context(), db.DSN)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	comments := regexp.MustCompile(`(?m)^--.*$`)
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".sql")
		text := query(t, name)
		prepared, err := conn.Prepare(t.Context(), name, text)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		comment := strings.Join(comments.FindAllString(text, -1), "\n")
		if !strings.HasPrefix(comment, "-- "+name+" ") {
			t.Errorf("%s: the comment begins with something else", name)
		}
		for i := range prepared.ParamOIDs {
			if !strings.Contains(comment, fmt.Sprintf("$%d ", i+1)) && !inRange(comment, i+1) {
				t.Errorf("%s: the comment does not tell $%d", name, i+1)
			}
		}
		if extra := fmt.Sprintf("$%d ", len(prepared.ParamOIDs)+1); strings.Contains(comment, extra) {
			t.Errorf("%s: the comment tells of %s, which the statement does not take", name, extra)
		}
	}
}

// inRange reports whether the comment says "$a to $b" over the number, or "$a, $b".
func inRange(comment string, number int) bool {
	for _, m := range regexp.MustCompile(`\$(\d+) to \$(\d+)`).FindAllStringSubmatch(comment, -1) {
		var from, to int
		if _, err := fmt.Sscan(m[1]+" "+m[2], &from, &to); err == nil && from <= number && number <= to {
			return true
		}
	}
	return strings.Contains(comment, fmt.Sprintf("$%d,", number))
}
