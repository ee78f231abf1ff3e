//go:build reconnect

package universal_test

import (
	"os"
	"os/user"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// TestReconnect restarts the server twice while the suite publishes 10,000 messages. The suite's test has data races of its own,
// so it runs without the race detector.
func TestReconnect(t *testing.T) {
	server, err := pgserver.Start(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	if server.DataDir() == "" {
		t.Fatal("the server must be one that can be restarted; set PGOUTBOX_TEST_PROVIDER=local")
	}
	s := newSetupOn(t, server.Database(t), pgoutbox.SubscriberConfig{Shards: 16})
	f := features()
	f.RestartServiceCommand = restartCommand(t, server)
	began := s.serverStart(t)
	tests.TestReconnect(t, tests.TestContext{TestID: tests.NewTestID(), Features: f}, func(t *testing.T) (message.Publisher, message.Subscriber) {
		return s.pubSub(t, "test")
	})
	if again := s.serverStart(t); !again.After(began) {
		t.Error("the server was not restarted")
	}
}

func (s *setup) serverStart(t *testing.T) (at time.Time) {
	t.Helper()
	if err := s.pool.QueryRow(t.Context(), "SELECT pg_postmaster_start_time()").Scan(&at); err != nil {
		t.Fatal(err)
	}
	return at
}

// restartCommand is pg_ctl as the user who owns the data.
func restartCommand(t *testing.T, server *pgserver.Server) []string {
	t.Helper()
	command := []string{server.BinDir() + "/pg_ctl", "restart", "-D", server.DataDir(), "-m", "fast", "-w", "-l", server.LogFile()}
	if os.Getuid() != 0 {
		return command
	}
	info, err := os.Stat(server.DataDir())
	if err != nil {
		t.Fatal(err)
	}
	owner, err := user.LookupId(strconv.FormatUint(uint64(info.Sys().(*syscall.Stat_t).Uid), 10))
	if err != nil {
		t.Fatal(err)
	}
	return append([]string{"runuser", "-u", owner.Username, "--"}, command...)
}
