package pgserver

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/ory/dockertest/v3"
)

// reaperEnv turns a process that contains this package into a reaper before its main function is reached.
const reaperEnv = "PGOUTBOX_TEST_REAPER"

// The reaper is this same executable, so that it works in test binaries, programs and `go run` alike, and no second program
// has to be built or found.
func init() { //nolint:gochecknoinits // must run before main and TestMain
	if os.Getenv(reaperEnv) == "" {
		return
	}
	if err := os.Unsetenv(reaperEnv); err != nil {
		os.Exit(1)
	}
	ignoreSignals()
	if err := reap(os.Stdin); err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

const (
	chargePostgres  = "postgres"
	chargeRedis     = "redis"
	chargePgBouncer = "pgbouncer"
	chargeContainer = "container"
)

// charge is something that must not outlive the process. On the pipe it is one line of JSON; a line with Released takes the
// charge of that ID back.
type charge struct {
	ID        int    `json:"id"`
	Released  bool   `json:"released,omitempty"`
	Kind      string `json:"kind,omitempty"`
	Dir       string `json:"dir,omitempty"`
	Bin       string `json:"bin,omitempty"`
	Endpoint  string `json:"endpoint,omitempty"`
	Container string `json:"container,omitempty"`
}

// reaper is the child process from the side of its parent. It runs as long as there is a charge.
type reaper struct {
	mu      sync.Mutex
	cmd     *exec.Cmd
	pipe    io.WriteCloser
	lastID  int
	charges int
}

var reaping reaper

// watch hands ch to the reaper. It is called before the thing is started, so that there is no instant at which it would be
// left behind.
func (r *reaper) watch(ch charge) (*watched, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cmd == nil {
		if err := r.start(); err != nil {
			return nil, fmt.Errorf("start the reaper: %w", err)
		}
	}
	r.lastID++
	ch.ID = r.lastID
	r.charges++
	if err := r.tell(ch); err != nil {
		return nil, errors.Join(err, r.drop())
	}
	return &watched{r, ch.ID}, nil
}

func (r *reaper) start() error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	// It inherits neither stdout nor stderr: `go test` waits until everyone has closed them.
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), reaperEnv+"=1")
	cmd.Dir = os.TempDir()
	detach(cmd)
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, pipe.Close())
	}
	r.cmd, r.pipe = cmd, pipe
	return nil
}

func (r *reaper) tell(ch charge) error {
	line, err := json.Marshal(ch)
	if err != nil {
		return err
	}
	if _, err := r.pipe.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("tell the reaper: %w", err)
	}
	return nil
}

// drop counts a charge down and ends the reaper after the last one.
func (r *reaper) drop() error {
	r.charges--
	if r.charges > 0 {
		return nil
	}
	err := errors.Join(r.pipe.Close(), r.cmd.Wait())
	r.cmd, r.pipe = nil, nil
	return err
}

// watched is one charge of a running reaper.
type watched struct {
	reaper *reaper
	id     int
}

// release is called when the thing is gone.
func (w *watched) release() error {
	w.reaper.mu.Lock()
	defer w.reaper.mu.Unlock()
	return errors.Join(w.reaper.tell(charge{ID: w.id, Released: true}), w.reaper.drop())
}

// reap reads charges until the parent is gone and then clears away what it did not release.
func reap(pipe io.Reader) error {
	charges := map[int]charge{}
	lines := bufio.NewScanner(pipe)
	for lines.Scan() {
		var ch charge
		if err := json.Unmarshal(lines.Bytes(), &ch); err != nil {
			continue // the parent died while it wrote; what came before still counts
		}
		if ch.Released {
			delete(charges, ch.ID)
		} else {
			charges[ch.ID] = ch
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs error
	for _, ch := range charges {
		errs = errors.Join(errs, ch.clear(ctx))
	}
	return errs
}

func (ch charge) clear(ctx context.Context) error {
	switch ch.Kind {
	case chargePostgres:
		return ch.clearPostgres(ctx)
	case chargeRedis:
		if pid, err := pidIn(filepath.Join(ch.Dir, "redis.pid")); err == nil {
			_ = kill(pid)
		}
		return removeAll(ctx, ch.Dir)
	case chargePgBouncer:
		if pid, err := pidIn(filepath.Join(ch.Dir, "pgbouncer.pid")); err == nil {
			_ = kill(pid)
		}
		return removeAll(ctx, ch.Dir)
	case chargeContainer:
		pool, err := dockertest.NewPool(ch.Endpoint)
		if err != nil {
			return err
		}
		return removeContainer(pool, ch.Container)
	default:
		return fmt.Errorf("unknown charge %q", ch.Kind)
	}
}

// clearPostgres looks twice: the parent may have died while pg_ctl was starting the server, which then writes its pid file,
// and its directory anew, a moment later.
func (ch charge) clearPostgres(ctx context.Context) error {
	owner, err := ownerOf(ch.Dir)
	if err != nil {
		return err
	}
	c := &cluster{bin: ch.Bin, dir: ch.Dir, account: owner}
	if err := c.destroy(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(500 * time.Millisecond):
	case <-ctx.Done():
	}
	if _, err := os.Stat(ch.Dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return c.destroy(ctx)
}
