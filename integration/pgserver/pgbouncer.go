package pgserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// PgBouncerOptions say how a PgBouncer is started.
type PgBouncerOptions struct {
	Mode     string // pool_mode: session or transaction
	PoolSize int    // server connections for each database
}

// PgBouncer is a PgBouncer that is up. It lets everybody in, and logs in to the server as the server's DSN says.
type PgBouncer struct {
	addr   string
	admin  string // connection string of its console
	end    func() error
	once   sync.Once
	endErr error
}

// StartPgBouncer starts Debian's pgbouncer, or what PATH holds, in front of s, on a free loopback port and with its files in
// a temporary directory. It runs as postgres or nobody when the caller is root, as whom it refuses to run. The caller closes it.
func (s *Server) StartPgBouncer(ctx context.Context, o PgBouncerOptions) (*PgBouncer, error) {
	bin, err := findPgBouncer()
	if err != nil {
		return nil, err
	}
	acc, err := serverAccount()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgoutbox-pgbouncer-")
	if err != nil {
		return nil, err
	}
	watch, err := reaping.watch(charge{Kind: chargePgBouncer, Dir: dir})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	remove := func() error {
		return errors.Join(removeAll(context.WithoutCancel(ctx), dir), watch.release())
	}
	b, err := s.runPgBouncer(ctx, bin, dir, acc, o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("pgserver: start pgbouncer: %w", err), remove())
	}
	stop := b.end
	b.end = func() error { return errors.Join(stop(), remove()) }
	return b, nil
}

// PgBouncer is StartPgBouncer for a test, which fails without one; it is stopped when the test ends.
func (s *Server) PgBouncer(t testing.TB, o PgBouncerOptions) *PgBouncer {
	t.Helper()
	b, err := s.StartPgBouncer(context.WithoutCancel(t.Context()), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

func findPgBouncer() (string, error) {
	for _, name := range []string{"pgbouncer", "/usr/sbin/pgbouncer"} { // sbin is seldom on a user's PATH
		if bin, err := exec.LookPath(name); err == nil {
			return bin, nil
		}
	}
	return "", errors.New("pgserver: no pgbouncer: install it (Debian and Ubuntu: apt-get install pgbouncer; macOS: brew install pgbouncer)")
}

func (s *Server) runPgBouncer(ctx context.Context, bin, dir string, acc account, o PgBouncerOptions) (*PgBouncer, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	ini := filepath.Join(dir, "pgbouncer.ini")
	text, err := s.pgBouncerConfig(dir, port, o)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(ini, []byte(text), 0o600); err != nil {
		return nil, err
	}
	if err := errors.Join(acc.own(dir), acc.own(ini)); err != nil {
		return nil, err
	}
	cmd := exec.Command(bin, "-q", ini)
	cmd.Dir = dir
	acc.runs(cmd)
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	b := &PgBouncer{
		addr: addr, admin: "postgres://postgres@" + addr + "/pgbouncer?sslmode=disable&default_query_exec_mode=simple_protocol",
		end: func() error {
			err := cmd.Process.Kill()
			_ = cmd.Wait() // reports the kill
			return err
		},
	}
	ready, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	if err := poll(ready, 20*time.Millisecond, b.answers); err != nil {
		said, _ := os.ReadFile(filepath.Join(dir, "pgbouncer.log"))
		return nil, errors.Join(err, b.end(), errors.New(lastLine(string(said))))
	}
	return b, nil
}

func (s *Server) pgBouncerConfig(dir string, port int, o PgBouncerOptions) (string, error) {
	cfg, err := pgx.ParseConfig(s.dsn)
	if err != nil {
		return "", errors.New("the server's connection string is none that pgx understands") // the error may quote the password
	}
	server := fmt.Sprintf("host=%s port=%d user=%s", cfg.Host, cfg.Port, iniQuote(cfg.User))
	if cfg.Password != "" {
		server += " password=" + iniQuote(cfg.Password)
	}
	return "[databases]\n* = " + server + "\n[pgbouncer]\n" + strings.Join([]string{
		"pool_mode = " + o.Mode,
		"default_pool_size = " + strconv.Itoa(o.PoolSize),
		"listen_addr = 127.0.0.1",
		"listen_port = " + strconv.Itoa(port),
		"unix_socket_dir =",
		"auth_type = any",
		"max_client_conn = 500",
		"logfile = " + filepath.Join(dir, "pgbouncer.log"),
		"pidfile = " + filepath.Join(dir, "pgbouncer.pid"),
	}, "\n") + "\n", nil
}

func iniQuote(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

func (b *PgBouncer) answers(ctx context.Context) error {
	_, err := b.Clients(ctx)
	return err
}

// DSN is dsn, one of the server's, by way of the pooler.
func (b *PgBouncer) DSN(dsn string) string {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return ""
	}
	return "postgres://postgres@" + b.addr + "/" + cfg.Database + "?sslmode=disable"
}

// Clients are the names, given as application_name, of the clients that are connected; the console's own is not among them.
func (b *PgBouncer) Clients(ctx context.Context) ([]string, error) {
	conn, err := pgx.Connect(ctx, b.admin)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	rows, err := conn.Query(ctx, "SHOW CLIENTS")
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToMap)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, client := range all {
		if client["database"] != "pgbouncer" {
			names = append(names, fmt.Sprint(client["application_name"]))
		}
	}
	return names, nil
}

// Close stops the pooler and removes what it wrote. The second call does nothing.
func (b *PgBouncer) Close() error {
	b.once.Do(func() {
		if err := b.end(); err != nil {
			b.endErr = fmt.Errorf("pgserver: close pgbouncer: %w", err)
		}
	})
	return b.endErr
}
