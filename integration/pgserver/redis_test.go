//go:build unix

package pgserver_test

import (
	"net"
	"path/filepath"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

func TestRedisComesFromTheFirstThatCanDeliver(t *testing.T) {
	t.Setenv("REDIS_URL", "")
	t.Setenv("DOCKER_HOST", silentSocket(t))
	first := startRedis(t)

	t.Run("its URL", func(t *testing.T) {
		t.Setenv("REDIS_URL", first.URL())
		r := startRedis(t)
		if r.Addr() != first.Addr() || !strings.Contains(r.Provider(), "REDIS_URL") {
			t.Errorf("%s at %s", r.Provider(), r.Addr())
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		ping(t, first)
	})
	t.Run("redis-server on PATH", func(t *testing.T) {
		if !strings.Contains(first.Provider(), "redis-server") {
			t.Errorf("%s", first.Provider())
		}
	})
	t.Run("miniredis when there is nothing else", func(t *testing.T) {
		t.Setenv("PATH", t.TempDir())
		r := startRedis(t)
		if !strings.Contains(r.Provider(), "miniredis") {
			t.Errorf("%s", r.Provider())
		}
		ping(t, r)
	})
}

func TestClosedRedisIsGone(t *testing.T) {
	t.Setenv("REDIS_URL", "")
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	r := startRedis(t)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if conn, err := net.Dial("tcp", r.Addr()); err == nil {
		_ = conn.Close()
		t.Error("it still answers")
	}
	if left, err := filepath.Glob(filepath.Join(temp, "*")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
	if err := r.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func startRedis(t *testing.T) *pgserver.Redis {
	t.Helper()
	r, err := pgserver.StartRedis(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	ping(t, r)
	return r
}

func ping(t *testing.T, r *pgserver.Redis) {
	t.Helper()
	o, err := redis.ParseURL(r.URL())
	if err != nil {
		t.Fatal(err)
	}
	client := redis.NewClient(o)
	defer client.Close()
	if err := client.Ping(t.Context()).Err(); err != nil {
		t.Error(err)
	}
}
