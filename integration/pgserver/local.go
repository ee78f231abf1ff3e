package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
)

// startLocal makes a cluster of the binaries on this machine and starts it.
func startLocal(ctx context.Context, o Options) (*Server, error) {
	want, err := wantedMajor()
	if err != nil {
		return nil, err
	}
	bin, err := findBinaries(ctx, o.BinDir, want)
	if err != nil {
		return nil, err
	}
	acc, err := serverAccount()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgoutbox-postgres-")
	if err != nil {
		return nil, err
	}
	c := &cluster{bin: bin.dir, dir: dir, account: acc}
	watch, err := reaping.watch(charge{Kind: chargePostgres, Dir: dir, Bin: bin.dir})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	end := func() error {
		// Not the caller's ctx: a server that is stopped because of a cancellation must still be stopped.
		return errors.Join(c.destroy(context.WithoutCancel(ctx)), watch.release())
	}
	s := &Server{source: "local binaries " + bin.dir, local: c, end: end}
	if err := s.bringUp(ctx, o); err != nil {
		return nil, errors.Join(err, end())
	}
	return s, nil
}

func (s *Server) bringUp(ctx context.Context, o Options) error {
	if err := s.local.account.own(s.local.dir); err != nil {
		return err
	}
	if err := s.local.create(ctx, o.settings()); err != nil {
		return err
	}
	return s.startOnFreePort(ctx)
}

func (s *Server) startOnFreePort(ctx context.Context) error {
	for range 5 { // another process may take the port before the server does
		port, err := freePort()
		if err != nil {
			return err
		}
		s.local.port = port
		s.dsn = fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", port)
		err = s.local.start(ctx)
		if err == nil {
			return s.identify(ctx)
		}
		if !strings.Contains(err.Error(), "could not create any TCP/IP sockets") {
			return err
		}
	}
	return errors.New("other processes took five free ports in a row")
}

var errNotLocal = errors.New("only a server started from local binaries can be stopped and started again; " +
	"set PGOUTBOX_TEST_PROVIDER=local")

// Stop stops a local server: "fast" ends sessions and shuts down cleanly, "immediate" is a crash that the next start recovers
// from. Other servers return an error and keep running.
func (s *Server) Stop(ctx context.Context, mode string) error {
	return s.control("stop", func(c *cluster) error { return c.stop(ctx, mode) })
}

// StartAgain starts a local server that was stopped or has crashed, on the same port, and returns when it accepts connections.
func (s *Server) StartAgain(ctx context.Context) error {
	return s.control("start", func(c *cluster) error { return c.start(ctx) })
}

// Restart is Stop and StartAgain.
func (s *Server) Restart(ctx context.Context, mode string) error {
	return s.control("restart", func(c *cluster) error {
		if err := c.stop(ctx, mode); err != nil {
			return err
		}
		return c.start(ctx)
	})
}

func (s *Server) control(what string, do func(*cluster) error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.local == nil {
		return fmt.Errorf("pgserver: %s %s: %w", what, s.Provider(), errNotLocal)
	}
	if s.closed {
		return fmt.Errorf("pgserver: %s %s: the server is closed", what, s.Provider())
	}
	if err := do(s.local); err != nil {
		return fmt.Errorf("pgserver: %s %s: %w", what, s.Provider(), err)
	}
	return nil
}

// PostmasterPID is the process id of a local server that is up. The error is os.ErrNotExist when it is down.
func (s *Server) PostmasterPID() (int, error) {
	if s.local == nil {
		return 0, fmt.Errorf("pgserver: process id of %s: %w", s.Provider(), errNotLocal)
	}
	return s.local.pid()
}

// DataDir is a local server's data directory, "" for other servers.
func (s *Server) DataDir() string {
	if s.local == nil {
		return ""
	}
	return s.local.data()
}

// BinDir holds the programs of a local server (pg_dump, pg_basebackup, pg_ctl), "" for other servers.
func (s *Server) BinDir() string {
	if s.local == nil {
		return ""
	}
	return s.local.bin
}

// LogFile is what a local server logs to, "" for other servers.
func (s *Server) LogFile() string {
	if s.local == nil {
		return ""
	}
	return s.local.log()
}
