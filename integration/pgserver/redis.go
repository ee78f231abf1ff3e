package pgserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
)

// Redis is a Redis server that is up.
type Redis struct {
	url    string
	source string
	end    func() error
	once   sync.Once
	endErr error
}

// StartRedis returns a server from REDIS_URL, else redis-server on PATH, else Docker, else miniredis in this process. A
// provider that cannot deliver is named with its reason through o.Logf. The caller closes it.
func StartRedis(ctx context.Context, o Options) (*Redis, error) {
	tried := []struct {
		name  string
		start func(context.Context) (*Redis, error)
	}{{"REDIS_URL", redisByURL}, {"redis-server", redisByBinary}, {"docker", redisByDocker}, {"miniredis", redisInProcess}}
	if os.Getenv("REDIS_URL") == "" {
		tried = tried[1:]
	}
	var reasons []string
	for _, p := range tried {
		r, err := p.start(ctx)
		if err == nil {
			o.logf("pgserver: using %s", r.Provider())
			return r, nil
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("pgserver: start Redis by %s: %w", p.name, context.Cause(ctx))
		}
		reason := p.name + ": " + oneLine(err)
		o.logf("pgserver: no Redis by %s", reason)
		reasons = append(reasons, reason)
	}
	return nil, fmt.Errorf("pgserver: no Redis: install redis-server or set REDIS_URL (%s)", strings.Join(reasons, "; "))
}

// URL is what redis.ParseURL takes; REDIS_URL may hold a password.
func (r *Redis) URL() string { return r.url }

// Addr is host:port.
func (r *Redis) Addr() string {
	o, err := redis.ParseURL(r.url)
	if err != nil {
		return ""
	}
	return o.Addr
}

// Provider is one line for people: the version, and where the server comes from.
func (r *Redis) Provider() string { return r.source }

// Close stops a server that was started and removes what it wrote. The second call does nothing.
func (r *Redis) Close() error {
	r.once.Do(func() {
		if err := r.end(); err != nil {
			r.endErr = fmt.Errorf("pgserver: close %s: %w", r.source, err)
		}
	})
	return r.endErr
}

// ping returns when the server answers.
func (r *Redis) ping(ctx context.Context, patience time.Duration) error {
	o, err := redis.ParseURL(r.url)
	if err != nil {
		return errors.New("the address is not a Redis URL") // the error would quote the password
	}
	client := redis.NewClient(o)
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	return poll(ctx, 20*time.Millisecond, func(ctx context.Context) error { return client.Ping(ctx).Err() })
}

func redisByURL(ctx context.Context) (*Redis, error) {
	r := &Redis{url: os.Getenv("REDIS_URL"), source: "Redis, found by REDIS_URL", end: func() error { return nil }}
	if err := r.ping(ctx, 2*time.Second); err != nil {
		return nil, err
	}
	return r, nil
}

var redisVersion = regexp.MustCompile(`v=(\S+)`)

func redisByBinary(ctx context.Context) (*Redis, error) {
	bin, err := exec.LookPath("redis-server")
	if err != nil {
		return nil, err
	}
	version := "?"
	if out, err := exec.CommandContext(ctx, bin, "--version").Output(); err == nil {
		if m := redisVersion.FindSubmatch(out); m != nil {
			version = string(m[1])
		}
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "pgoutbox-redis-")
	if err != nil {
		return nil, err
	}
	watch, err := reaping.watch(charge{Kind: chargeRedis, Dir: dir})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	cmd := exec.Command(bin, "--port", strconv.Itoa(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
		"--dir", dir, "--pidfile", filepath.Join(dir, "redis.pid"), "--logfile", filepath.Join(dir, "redis.log"))
	detach(cmd)
	end := func() error {
		var err error
		if cmd.Process != nil {
			err = cmd.Process.Kill()
			_ = cmd.Wait() // reports the kill
		}
		return errors.Join(err, os.RemoveAll(dir), watch.release())
	}
	if err := cmd.Start(); err != nil {
		return nil, errors.Join(err, end())
	}
	r := &Redis{
		url:    "redis://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) + "/0",
		source: "Redis " + version + ", local " + bin,
		end:    end,
	}
	if err := r.ping(ctx, 10*time.Second); err != nil {
		return nil, errors.Join(err, end())
	}
	return r, nil
}

func redisByDocker(ctx context.Context) (*Redis, error) {
	d, err := findDaemon(ctx)
	if err != nil {
		return nil, err
	}
	c, image, err := d.start(ctx, "redis", []string{"7", "7-alpine"}, "6379/tcp", nil, nil)
	if err != nil {
		return nil, err
	}
	r := &Redis{url: "redis://" + c.addr + "/0", source: "Redis, Docker image " + image, end: c.close}
	if err := r.ping(ctx, 30*time.Second); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	return r, nil
}

func redisInProcess(context.Context) (*Redis, error) {
	m := miniredis.NewMiniRedis()
	if err := m.Start(); err != nil {
		return nil, err
	}
	return &Redis{
		url:    "redis://" + m.Addr() + "/0",
		source: "miniredis in this process",
		end:    func() error { m.Close(); return nil },
	}, nil
}
