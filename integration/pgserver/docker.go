package pgserver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"
)

const (
	defaultImageTag  = "18"
	daemonTimeout    = 1500 * time.Millisecond
	pullTimeout      = 3 * time.Minute
	containerSeconds = 3600 // after which a container stops by itself, whatever happened to us
)

// daemon is a Docker daemon that answers.
type daemon struct {
	pool     *dockertest.Pool
	endpoint string
}

// findDaemon gives a daemon that does not answer only a moment: every test package asks it.
func findDaemon(ctx context.Context) (*daemon, error) {
	endpoint := dockerEndpoint()
	pool, err := dockertest.NewPool(endpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, daemonTimeout)
	defer cancel()
	if err := pool.Client.PingWithContext(ctx); err != nil {
		return nil, fmt.Errorf("no daemon answers at %s: %w", pool.Client.Endpoint(), err)
	}
	return &daemon{pool, pool.Client.Endpoint()}, nil
}

// dockerEndpoint is "" where dockertest finds the daemon by itself. Docker Desktop and rootless daemons have their sockets
// in places of their own, which only the docker command knows.
func dockerEndpoint() string {
	for _, name := range []string{"DOCKER_HOST", "DOCKER_URL", "DOCKER_MACHINE_NAME"} {
		if os.Getenv(name) != "" {
			return ""
		}
	}
	sockets := []string{"/var/run/docker.sock"}
	if dir := os.Getenv("XDG_RUNTIME_DIR"); dir != "" {
		sockets = append(sockets, filepath.Join(dir, "docker.sock"))
	}
	if home, err := os.UserHomeDir(); err == nil {
		sockets = append(sockets, filepath.Join(home, ".docker", "run", "docker.sock"))
	}
	for _, s := range sockets {
		if _, err := os.Stat(s); err == nil {
			return "unix://" + s
		}
	}
	return ""
}

// container is a running container, and the address of its one port.
type container struct {
	pool  *dockertest.Pool
	name  string
	watch *watched
	addr  string
}

// start runs an image, which is pulled unless the daemon has it.
func (d *daemon) start(ctx context.Context, repository string, tags []string, port string, env, cmd []string) (*container, string, error) {
	tag, err := d.image(ctx, repository, tags)
	if err != nil {
		return nil, "", err
	}
	// The name is known before the container exists, and so the reaper can be told in time.
	c := &container{pool: d.pool, name: "pgoutbox-" + strings.ToLower(rand.Text())}
	c.watch, err = reaping.watch(charge{Kind: chargeContainer, Endpoint: d.endpoint, Container: c.name})
	if err != nil {
		return nil, "", err
	}
	resource, err := d.pool.RunWithOptions(&dockertest.RunOptions{
		Name:         c.name,
		Repository:   repository,
		Tag:          tag,
		Env:          env,
		Cmd:          cmd,
		ExposedPorts: []string{port},
		PortBindings: map[docker.Port][]docker.PortBinding{docker.Port(port): {{HostIP: d.bindIP(), HostPort: "0"}}},
	}, func(host *docker.HostConfig) {
		host.AutoRemove = true
		host.ShmSize = 256 << 20
	})
	if err != nil {
		return nil, "", errors.Join(fmt.Errorf("run %s:%s: %w", repository, tag, err), c.close())
	}
	if err := resource.Expire(containerSeconds); err != nil {
		return nil, "", errors.Join(err, c.close())
	}
	c.addr = resource.GetHostPort(port)
	if host := d.remoteHost(); host != "" {
		c.addr = host + ":" + resource.GetPort(port)
	}
	return c, repository + ":" + tag, nil
}

// image returns the first tag that the daemon has, else the last one, pulled.
func (d *daemon) image(ctx context.Context, repository string, tags []string) (string, error) {
	for _, tag := range tags {
		if _, err := d.pool.Client.InspectImage(repository + ":" + tag); err == nil {
			return tag, nil
		}
	}
	tag := tags[len(tags)-1]
	ctx, cancel := context.WithTimeout(ctx, pullTimeout)
	defer cancel()
	err := d.pool.Client.PullImage(docker.PullImageOptions{Repository: repository, Tag: tag, Context: ctx}, docker.AuthConfiguration{})
	if err != nil {
		return "", fmt.Errorf("pull %s:%s: %w", repository, tag, err)
	}
	return tag, nil
}

// remoteHost is the machine that the daemon runs on when it is not this one.
func (d *daemon) remoteHost() string {
	u, err := url.Parse(d.endpoint)
	if err != nil || u.Scheme == "unix" || u.Scheme == "npipe" {
		return ""
	}
	return u.Hostname()
}

func (d *daemon) bindIP() string {
	if d.remoteHost() != "" {
		return "" // every address of that machine
	}
	return "127.0.0.1"
}

func (c *container) close() error {
	return errors.Join(removeContainer(c.pool, c.name), c.watch.release())
}

// removeContainer is content with a container that never came to be or is already gone.
func removeContainer(pool *dockertest.Pool, name string) error {
	err := pool.Client.RemoveContainer(docker.RemoveContainerOptions{ID: name, Force: true, RemoveVolumes: true})
	var gone *docker.NoSuchContainer
	if err != nil && !errors.As(err, &gone) {
		return fmt.Errorf("remove container %s: %w", name, err)
	}
	return nil
}

// startDocker runs the official image.
func startDocker(ctx context.Context, o Options) (*Server, error) {
	want, err := wantedMajor()
	if err != nil {
		return nil, err
	}
	d, err := findDaemon(ctx)
	if err != nil {
		return nil, err
	}
	tag := defaultImageTag
	if want != 0 {
		tag = strconv.Itoa(want)
	}
	env := []string{"POSTGRES_HOST_AUTH_METHOD=trust", "POSTGRES_INITDB_ARGS=--no-sync --encoding=UTF8 --locale=C"}
	cmd := []string{"postgres"}
	for name, value := range o.settings() {
		cmd = append(cmd, "-c", name+"="+value)
	}
	c, image, err := d.start(ctx, "postgres", []string{tag, tag + "-alpine"}, "5432/tcp", env, cmd)
	if err != nil {
		return nil, err
	}
	s := &Server{
		dsn:    "postgres://postgres@" + c.addr + "/postgres?sslmode=disable",
		source: "Docker image " + image,
		end:    c.close,
	}
	// The port answers before the server does, and the image starts the server twice.
	ready, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := poll(ready, 100*time.Millisecond, s.identify); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}
