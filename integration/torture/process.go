package torture

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Process is a Reader that runs another one in a child process, which is this test binary once more. Killing it is a real
// SIGKILL, so nothing of its state survives. The child prints a delivery and waits until the sink here has logged and
// acknowledged it; only then does it ack. So the log here is right about what was delivered before what.
type Process struct {
	Role string                           // the reader in the map that Child is called with
	Logf func(format string, args ...any) // gets what the child says on standard error; nil = only the end of it, in Run's error
}

// stopTime is how long a child may take to end in an orderly way.
const stopTime = 20 * time.Second

const (
	roleVariable = "PGOUTBOX_TORTURE_ROLE"
	dsnVariable  = "PGOUTBOX_TORTURE_DSN"
)

// report is a line from a child, reply the answer to it.
type report struct {
	N        int64 `json:"n"`
	Delivery `json:"d"`
}

type reply struct {
	N  int64 `json:"n"`
	OK bool  `json:"ok"`
}

// Run starts the child and ends with it.
func (p Process) Run(ctx context.Context, dsn string, deliver Deliver) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	child := exec.Command(self) // not CommandContext: how it dies depends on the cause
	child.Env = append(os.Environ(), roleVariable+"="+p.Role, dsnVariable+"="+dsn)
	said := &said{logf: p.Logf, role: p.Role}
	child.Stderr = said
	stdin, err := child.StdinPipe()
	if err != nil {
		return err
	}
	stdout, err := child.StdoutPipe()
	if err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start a child: %w", err)
	}

	// Handlers outlive the wish to stop, but not the child.
	handling, gone := context.WithCancel(context.WithoutCancel(ctx))
	defer gone()
	var running sync.WaitGroup
	running.Go(func() { endChild(ctx, handling, child) })
	err = p.talk(handling, &running, stdout, stdin, deliver)
	if err != nil {
		_ = child.Process.Kill() // nobody listens to it any more; it may be gone
	}
	gone()
	running.Wait()
	waitErr := child.Wait()
	if errors.Is(context.Cause(ctx), ErrKilled) {
		return nil
	}
	if ended := new(exec.ExitError); err == nil && ctx.Err() != nil && errors.As(waitErr, &ended) && endedBy(ended, syscall.SIGTERM) {
		return nil // it was asked to stop before it could listen
	}
	if waitErr != nil && err == nil {
		return fmt.Errorf("child %s: %w; it said: %s", p.Role, waitErr, said.last)
	}
	return err
}

// talk answers the child's reports until its output ends.
func (p Process) talk(handling context.Context, running *sync.WaitGroup, from io.Reader, to io.Writer, deliver Deliver) error {
	var mu sync.Mutex
	answer := json.NewEncoder(to)
	for reports := json.NewDecoder(from); ; {
		var r report
		if err := reports.Decode(&r); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				return nil // a killed child may leave half a line
			}
			return fmt.Errorf("read child %s: %w", p.Role, err)
		}
		ack := deliver(r.Delivery)
		running.Go(func() {
			ok := ack(handling) == nil
			if handling.Err() != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			_ = answer.Encode(reply{r.N, ok}) // a child that is gone needs no answer
		})
	}
}

func endedBy(err *exec.ExitError, signal syscall.Signal) bool {
	status, ok := err.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == signal
}

// endChild waits for ctx and then ends the child in the way that its cause wants, unless it is gone first.
func endChild(ctx, gone context.Context, child *exec.Cmd) {
	select {
	case <-gone.Done():
		return
	case <-ctx.Done():
	}
	if !errors.Is(context.Cause(ctx), ErrKilled) {
		_ = child.Process.Signal(syscall.SIGTERM) // it may have ended by itself
		if pause(gone, stopTime) != nil {
			return
		}
	}
	_ = child.Process.Kill()
}

// said takes what a child says on standard error, line by line.
type said struct {
	logf func(format string, args ...any)
	role string
	last []byte // not longer than maxSaid
	rest []byte // a line that has not ended
}

const maxSaid = 2000

// Write is called by one goroutine, which has ended when Wait returns.
func (s *said) Write(p []byte) (int, error) {
	s.last = append(s.last, p...)
	s.last = s.last[max(0, len(s.last)-maxSaid):]
	if s.logf == nil {
		return len(p), nil
	}
	s.rest = append(s.rest, p...)
	for {
		line, rest, ok := bytes.Cut(s.rest, []byte("\n"))
		if !ok {
			return len(p), nil
		}
		s.logf("%s: %s", s.role, line)
		s.rest = rest
	}
}
