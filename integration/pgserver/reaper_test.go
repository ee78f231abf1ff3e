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
	for _, death := range []string{"kill", "panic"} {
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
				// The whole group, as a terminal's Ctrl-C or a CI runner would.
				if err := syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Wait(); err == nil {
				t.Fatal("the victim ended well")
			}
			eventually(t, 20*time.Second, "the directories are removed", func() bool {
				left, err := filepath.Glob(filepath.Join(temp, "pgoutbox-*"))
				return err == nil && len(left) == 0
			})
			if conn, err := pgx.Connect(t.Context(), dsn); err == nil {
				_ = conn.Close(t.Context())
				t.Error("PostgreSQL still answers")
			}
			if conn, err := net.Dial("tcp", redis); err == nil {
				_ = conn.Close()
				t.Error("Redis still answers")
			}
		})
	}
}

// openTempDir is a directory that the server's user may enter, which t.TempDir is not for everyone.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "pgserver-test-")
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

func killHard(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "the process is gone", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
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
