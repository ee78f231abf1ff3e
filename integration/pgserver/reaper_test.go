//go:build unix

package pgserver_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	osexec "os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// victim is this test binary as another process: it starts both servers, says where, and waits to be killed.
func victim() {
	s, err := pgserver.Start(context.Background(), pgserver.Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	r, err := pgserver.StartRedis(context.Background(), pgserver.Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(s.DSN(), s.DataDir(), r.Addr())
	if os.Getenv("PGSERVER_TEST_VICTIM") == "panic" {
		panic("as a test that timed out does")
	}
	select {}
}

func TestReaperClearsUpAfterAProcessThatDied(t *testing.T) {
	for _, death := range []string{"kill", "panic", "kill during the start"} {
		t.Run(death, func(t *testing.T) {
			t.Setenv("REDIS_URL", "")
			temp := openTempDir(t)
			cmd := osexec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "PGSERVER_TEST_VICTIM="+death, "PGOUTBOX_TEST_PROVIDER=local", "TMPDIR="+temp)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if death == "kill during the start" {
				eventually(t, 20*time.Second, "the data directory is being filled", func() bool {
					found, err := filepath.Glob(filepath.Join(temp, "pgoutbox-postgres-*", "data", "base"))
					return err == nil && len(found) > 0
				})
				// Only the process: initdb goes on writing while the reaper removes.
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
				_ = cmd.Wait() // reports the kill
				eventually(t, 20*time.Second, "the directories are removed", func() bool { return isEmpty(temp) })
				return
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			said := strings.Fields(line)
			if len(said) != 3 {
				t.Fatalf("the victim said %q", line)
			}
			dsn, dir, redis := said[0], said[1], said[2]
			if death == "kill" {
				if _, err := os.Stat(dir); err != nil {
					t.Fatal(err)
				}
				killGroup(t, cmd)
			} else if err := cmd.Wait(); err == nil {
				t.Fatal("the victim ended well")
			}
			eventually(t, 20*time.Second, "the directories are removed", func() bool { return isEmpty(temp) })
			// A process that was killed may answer for a moment after its files are gone.
			eventually(t, 10*time.Second, "PostgreSQL is gone", func() bool {
				conn, err := pgx.Connect(t.Context(), dsn)
				if err == nil {
					_ = conn.Close(t.Context())
				}
				return err != nil
			})
			eventually(t, 10*time.Second, "Redis is gone", func() bool {
				conn, err := net.Dial("tcp", redis)
				if err == nil {
					_ = conn.Close()
				}
				return err != nil
			})
		})
	}
}

// The backend is halted so that it is certain to be there still when the next postmaster comes.
func TestServerComesBackAfterItsPostmasterWasKilled(t *testing.T) {
	s := local(t)
	conn, err := pgx.Connect(t.Context(), s.DSN())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	backend := int(conn.PgConn().PID())
	postmaster, err := s.PostmasterPID()
	if err != nil {
		t.Fatal(err)
	}
	signal(t, backend, syscall.SIGSTOP)
	signal(t, postmaster, syscall.SIGKILL)
	eventually(t, 10*time.Second, "the postmaster is gone", func() bool { return !isRunning(postmaster) })
	started := make(chan error, 1)
	go func() { started <- s.StartAgain(t.Context()) }()
	eventually(t, 20*time.Second, "a start has failed because of the backend", func() bool {
		text, err := os.ReadFile(s.LogFile())
		return err == nil && strings.Contains(string(text), "still in use")
	})
	signal(t, backend, syscall.SIGCONT)
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	if one := query[int](t, s.DSN(), "SELECT 1"); one != 1 {
		t.Error("no answer")
	}
}

func isRunning(pid int) bool { return !errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) }

func signal(t *testing.T, pid int, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(pid, sig); err != nil {
		t.Fatal(err)
	}
}

// killGroup kills cmd as a terminal or a CI runner does, with everything in its group.
func killGroup(t *testing.T, cmd *osexec.Cmd) {
	t.Helper()
	if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Fatal("the victim ended well")
	}
}

func isEmpty(dir string) bool {
	entries, err := os.ReadDir(dir)
	return err == nil && len(entries) == 0
}

// openTempDir is a directory that the server's user may enter, which t.TempDir is not for everyone.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgserver-test-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// silentSocket is a daemon that takes connections and never answers.
func silentSocket(t *testing.T) string {
	t.Helper()
	path := filepath.Join(openTempDir(t), "docker.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return "unix://" + path
}

func eventually(t *testing.T, within time.Duration, what string, holds func() bool) {
	t.Helper()
	deadline := time.After(within)
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within %s: %s", within, what)
		}
	}
}
