//go:build unix

package cases_test

import (
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// providerVariable is read when a server starts, and tests start servers side by side.
var providerMu sync.Mutex

const providerVariable = "PGOUTBOX_TEST_PROVIDER"

// ownServer starts a server for a test that stops, freezes or measures it: one from local binaries, whatever the others run
// on.
func ownServer(t testing.TB, settings map[string]string) *pgserver.Server {
	t.Helper()
	return ownServerOf(t, "", settings)
}

// ownServerOf starts one from the programs of a directory, "": those of the other servers.
func ownServerOf(t testing.TB, binDir string, settings map[string]string) *pgserver.Server {
	t.Helper()
	pgserver.Shared(t) // chosen first, as the environment wants it
	providerMu.Lock()
	defer providerMu.Unlock()
	before, set := os.LookupEnv(providerVariable)
	must(t, os.Setenv(providerVariable, "local")) //nolint:usetesting // t.Setenv forbids parallel tests
	defer func() {
		if set {
			_ = os.Setenv(providerVariable, before) //nolint:usetesting // as above
		} else {
			_ = os.Unsetenv(providerVariable)
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := pgserver.Start(ctx, pgserver.Options{Logf: t.Logf, Settings: settings, BinDir: binDir})
	must(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// freeze makes a server silent: its processes stop, its sockets stay open. thaw, which may be called again, ends it.
func freeze(t testing.TB, s *pgserver.Server) (thaw func()) {
	t.Helper()
	postmaster, err := s.PostmasterPID()
	must(t, err)
	must(t, syscall.Kill(postmaster, syscall.SIGSTOP)) // first, so that no further child comes
	var once sync.Once
	stopped := []int{postmaster}
	thaw = func() {
		once.Do(func() {
			for _, pid := range stopped {
				_ = syscall.Kill(pid, syscall.SIGCONT) // it may have ended
			}
		})
	}
	t.Cleanup(thaw)
	for _, pid := range childrenOf(t, postmaster) {
		if syscall.Kill(pid, syscall.SIGSTOP) == nil {
			stopped = append(stopped, pid)
		}
	}
	return thaw
}

func childrenOf(t testing.TB, parent int) []int {
	t.Helper()
	list, err := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
	must(t, err)
	var out []int
	for line := range strings.Lines(string(list)) {
		fields := strings.Fields(line)
		if len(fields) != 2 || fields[1] != strconv.Itoa(parent) {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		must(t, err)
		out = append(out, pid)
	}
	return out
}
