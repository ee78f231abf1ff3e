package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Standby starts a hot standby of a local server, on a copy of its files, for which the server is stopped for a moment. Settings
// of o are added to those of the server. The caller closes it.
func (s *Server) Standby(ctx context.Context, o Options) (*Server, error) {
	var copied *Server
	err := s.control("copy", func(primary *cluster) error {
		dir, err := os.MkdirTemp("", "pgoutbox-postgres-")
		if err != nil {
			return err
		}
		c := &cluster{bin: primary.bin, dir: dir, account: primary.account}
		watch, err := reaping.watch(charge{Kind: chargePostgres, Dir: dir, Bin: c.bin})
		if err != nil {
			return errors.Join(err, os.RemoveAll(dir))
		}
		copied = &Server{source: "a standby of " + s.source, local: c, end: func() error {
			return errors.Join(c.destroy(context.WithoutCancel(ctx)), watch.release()) // also after a cancellation
		}}
		if err := c.account.own(dir); err != nil {
			return err
		}
		if err := primary.stop(ctx, "fast"); err != nil {
			return err
		}
		err = c.copyOf(ctx, primary, o.Settings)
		return errors.Join(err, primary.start(ctx))
	})
	if err == nil {
		err = copied.startOnFreePort(ctx)
	}
	if err != nil && copied != nil {
		err = errors.Join(err, copied.end())
	}
	if err != nil {
		return nil, err
	}
	return copied, nil
}

// copyOf makes the files of a stopped server those of its standby.
func (c *cluster) copyOf(ctx context.Context, primary *cluster, settings map[string]string) error {
	said, err := exec.CommandContext(ctx, "cp", "-a", primary.data(), c.data()).CombinedOutput()
	if err != nil {
		return fmt.Errorf("copy the data directory: %w: %s", err, lastLine(string(said)))
	}
	if err := c.configure(map[string]string{"primary_conninfo": fmt.Sprintf("host=127.0.0.1 port=%d user=postgres", primary.port)}); err != nil {
		return err
	}
	return errors.Join(c.configure(settings), c.stayStandby())
}

// stayStandby has the next start be that of a standby.
func (c *cluster) stayStandby() error {
	signal := filepath.Join(c.data(), "standby.signal")
	return errors.Join(os.WriteFile(signal, nil, 0o600), c.account.own(signal))
}

// Demote restarts a local server as a standby of nobody, which promotion ends.
func (s *Server) Demote(ctx context.Context) error {
	return s.control("demote", func(c *cluster) error {
		if err := c.stop(ctx, "fast"); err != nil {
			return err
		}
		return errors.Join(c.stayStandby(), c.start(ctx))
	})
}
