package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// oldest is the lowest major version of PostgreSQL that the library supports.
const oldest = 14

// Options say how a server is started. The zero value is fine.
type Options struct {
	// Logf receives one line for each provider that cannot deliver and one for the server in use. Default: nothing is said.
	Logf func(format string, args ...any)
	// Settings are added to postgresql.conf, over this package's own. A server given by PGOUTBOX_TEST_DSN is passed over when
	// it has other values.
	Settings map[string]string
	// BinDir holds initdb, pg_ctl and postgres, of whatever version, for a server started from local binaries. Default: see the
	// package comment.
	BinDir string
}

func (o Options) logf(format string, args ...any) {
	if o.Logf != nil {
		o.Logf(format, args...)
	}
}

// settings are what every server started here runs with. fsync stays on: tests that crash the server rely on it.
func (o Options) settings() map[string]string {
	s := map[string]string{
		"max_connections":           "500",
		"max_prepared_transactions": "20",
		"shared_buffers":            "128MB",
	}
	maps.Copy(s, o.Settings)
	return s
}

// Server is a PostgreSQL server that is up. Its methods may be called concurrently, except that a call to Stop, StartAgain,
// Restart or Close waits for the one before.
type Server struct {
	dsn     string
	version string
	major   int
	source  string
	local   *cluster // nil for a server that this package cannot stop and start again
	mu      sync.Mutex
	closed  bool
	end     func() error // nil for a server that was not started here
}

type provider struct {
	name  string
	start func(context.Context, Options) (*Server, error)
}

// Start returns a server from the first provider that can deliver, see the package comment. The caller closes it. An error
// means that no provider could and says what to install; nothing is left running then.
func Start(ctx context.Context, o Options) (*Server, error) {
	tried, err := providers()
	if err != nil {
		return nil, err
	}
	var reasons []string
	for _, p := range tried {
		s, err := p.start(ctx, o)
		if err == nil {
			o.logf("pgserver: using %s", s.Provider())
			return s, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("pgserver: start PostgreSQL by %s: %w", p.name, context.Cause(ctx))
		}
		reason := p.name + ": " + oneLine(err)
		o.logf("pgserver: no PostgreSQL by %s", reason)
		reasons = append(reasons, reason)
	}
	return nil, fmt.Errorf("pgserver: no PostgreSQL: install a server of version %d or newer (Debian and Ubuntu: apt-get install "+
		"postgresql; macOS: brew install postgresql@17), start a Docker daemon, or set PGOUTBOX_TEST_DSN to a superuser's "+
		"connection string (%s)", oldest, strings.Join(reasons, "; "))
}

func providers() ([]provider, error) {
	all := []provider{{"dsn", startDSN}, {"docker", startDocker}, {"local", startLocal}}
	final := os.Getenv("PGOUTBOX_TEST_PROVIDER")
	if final == "" {
		if os.Getenv("PGOUTBOX_TEST_DSN") == "" {
			return all[1:], nil
		}
		return all, nil
	}
	for _, p := range all {
		if p.name == final {
			return []provider{p}, nil
		}
	}
	return nil, fmt.Errorf("pgserver: PGOUTBOX_TEST_PROVIDER is %q; it can be dsn, docker or local", final)
}

// wantedMajor is PGOUTBOX_TEST_VERSION, 0 when any version will do.
func wantedMajor() (int, error) {
	v := os.Getenv("PGOUTBOX_TEST_VERSION")
	if v == "" {
		return 0, nil
	}
	major, err := strconv.Atoi(v)
	if err != nil || major < oldest {
		return 0, fmt.Errorf("PGOUTBOX_TEST_VERSION is %q; it takes a major version, %d or newer", v, oldest)
	}
	return major, nil
}

// DSN is the connection string of a superuser in the server's maintenance database.
func (s *Server) DSN() string { return s.dsn }

// Provider is one line for people: the version, and where the server comes from.
func (s *Server) Provider() string { return fmt.Sprintf("PostgreSQL %s, %s", s.version, s.source) }

// Major is the server's major version, such as 17.
func (s *Server) Major() int { return s.major }

// Close stops a server that Start started and removes what it wrote; a server found by its DSN is left as it is. The second
// call does nothing.
func (s *Server) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.end == nil {
		return nil
	}
	s.closed = true
	if err := s.end(); err != nil {
		return fmt.Errorf("pgserver: close %s: %w", s.Provider(), err)
	}
	return nil
}

// identify asks the server for its version.
func (s *Server) identify(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var number int
	const ask = "SELECT current_setting('server_version'), current_setting('server_version_num')::int"
	if err := conn.QueryRow(ctx, ask).Scan(&s.version, &number); err != nil {
		return fmt.Errorf("ask for the version: %w", err)
	}
	s.version, _, _ = strings.Cut(s.version, " ") // Debian appends its package's version
	s.major = number / 10000
	return nil
}

// poll calls try until it succeeds or ctx ends, and then returns the last error.
func poll(ctx context.Context, every time.Duration, try func(context.Context) error) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

func oneLine(err error) string {
	return strings.Join(strings.Fields(err.Error()), " ")
}
