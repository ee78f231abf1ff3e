package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// cluster is a data directory and the programs that serve it.
type cluster struct {
	bin     string // where initdb and pg_ctl are
	dir     string // holds data and log
	port    int
	account account
}

func (c *cluster) data() string { return filepath.Join(c.dir, "data") }

func (c *cluster) log() string { return filepath.Join(c.dir, "log") }

// create fills the directory. It does not sync: the machine would have to crash within the test for that to matter, while
// a crash of the server loses nothing that was written.
func (c *cluster) create(ctx context.Context, settings map[string]string) error {
	err := c.run(ctx, "initdb", "-D", c.data(), "--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C")
	if err != nil {
		return err
	}
	return errors.Join(c.configure(map[string]string{"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}), c.configure(settings))
}

// configure appends to postgresql.conf, where the last line about a parameter counts.
func (c *cluster) configure(settings map[string]string) error {
	var conf strings.Builder
	conf.WriteString("\n")
	for name, value := range settings {
		fmt.Fprintf(&conf, "%s = '%s'\n", name, strings.ReplaceAll(value, "'", "''"))
	}
	f, err := os.OpenFile(filepath.Join(c.data(), "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := f.WriteString(conf.String()); err != nil {
		return errors.Join(err, f.Close())
	}
	return f.Close()
}

// start brings the server up. It waits for the leftovers of a crash (backends that have not yet noticed that their
// postmaster is gone) instead of failing on them.
func (c *cluster) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		said := c.logSize()
		err := c.run(ctx, "pg_ctl", "start", "-D", c.data(), "-l", c.log(), "-w", "-t", "60", "-o", "-p "+strconv.Itoa(c.port))
		if err == nil {
			return nil
		}
		lines := c.loggedSince(said)
		err = errors.Join(err, complaint(lines))
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, "still in use") }) {
			return err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		}
	}
}

func (c *cluster) stop(ctx context.Context, mode string) error {
	return c.run(ctx, "pg_ctl", "stop", "-D", c.data(), "-m", mode, "-w", "-t", "60")
}

// pid is the postmaster's, os.ErrNotExist when the server is down.
func (c *cluster) pid() (int, error) { return pidIn(filepath.Join(c.data(), "postmaster.pid")) }

// destroy stops the server if it is up and removes the directory.
func (c *cluster) destroy(ctx context.Context) error {
	if _, err := c.pid(); err == nil {
		stopping, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if err := c.stop(stopping, "immediate"); err != nil {
			// Someone stopped the processes (SIGSTOP), or the pid file is a crashed server's.
			if pid, err := c.pid(); err == nil {
				_ = kill(pid)
			}
		}
	}
	return removeAll(ctx, c.dir)
}

// removeAll is patient: a process that is just ending may still add a file.
func removeAll(ctx context.Context, dir string) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, 50*time.Millisecond, func(context.Context) error { return os.RemoveAll(dir) })
}

func (c *cluster) run(ctx context.Context, program string, args ...string) error {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, program), args...)
	c.account.runs(cmd)
	cmd.Dir = c.dir // the server's user may not enter the caller's
	cmd.Env = append(environWithout("PG", "LC_", "LANG"), "LC_ALL=C")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", program, args[0], err, lastLine(string(out)))
	}
	return nil
}

func (c *cluster) logSize() int64 {
	info, err := os.Stat(c.log())
	if err != nil {
		return 0
	}
	return info.Size()
}

func (c *cluster) loggedSince(size int64) []string {
	text, err := os.ReadFile(c.log())
	if err != nil || int64(len(text)) < size {
		return nil
	}
	return strings.Split(strings.TrimSpace(string(text[size:])), "\n")
}

// complaint says why the server did not start: the last FATAL line, unless it is one of a backend that a crash left behind.
func complaint(lines []string) error {
	for _, line := range slices.Backward(lines) {
		_, fatal, ok := strings.Cut(line, "FATAL:")
		if ok && !strings.Contains(fatal, "terminating connection") {
			return errors.New(strings.TrimSpace(fatal))
		}
	}
	return errors.New("the server's log does not say why")
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.TrimSpace(lines[len(lines)-1])
}

// environWithout is the environment less the variables that begin with one of the prefixes: PGDATA or PGPORT would lead
// pg_ctl to another server.
func environWithout(prefixes ...string) []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool {
		return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(v, p) })
	})
}

func pidIn(file string) (int, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	first, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(first))
	if err != nil {
		return 0, fmt.Errorf("read the process id in %s: %w", file, err)
	}
	return pid, nil
}
