//go:build unix

package faults

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"
)

// Role is what a child process does.
type Role struct {
	DSN    string
	Bridge bool // a PublisherBridge; a Subscriber otherwise
	Shards int
	Lanes  int           // of the bridge; MaxInFlight of the Subscriber
	Work   time.Duration // how long each row takes before it is acked
	Serial bool          // one row at a time, while the others wait to be taken over
	Hold   string        // rows of this key are acked only after Ack, whatever their contexts say
	Poison string        // a row of this key ends the process

	MaxAttempts int // failures, or deaths, after which a row is parked; 0 = never

	Lease, Retry, Save time.Duration // 0 = the product's own
}

// Process is this test binary once more, in a Role. What it delivers goes to a Journal. It is not safe for concurrent use.
type Process struct {
	PID     int
	command *exec.Cmd
	stdin   io.WriteCloser
	said    *said
	reading sync.WaitGroup
	done    chan struct{}
	ended   bool
}

const roleVariable = "PGOUTBOX_FAULTS_ROLE"

// Start starts a child. The caller ends it with Kill.
func Start(role Role, into *Journal) (*Process, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(role)
	if err != nil {
		return nil, err
	}
	p := &Process{command: exec.Command(self), said: &said{}, done: make(chan struct{})}
	p.command.Env = append(os.Environ(), roleVariable+"="+string(text))
	p.command.Stderr = p.said
	if p.stdin, err = p.command.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := p.command.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := p.command.Start(); err != nil {
		return nil, fmt.Errorf("start a child: %w", err)
	}
	p.PID = p.command.Process.Pid
	p.reading.Go(func() {
		defer close(p.done)
		for from := json.NewDecoder(stdout); ; {
			var d Delivery
			if from.Decode(&d) != nil {
				return // a killed child may leave half a line
			}
			into.Add(d)
		}
	})
	return p, nil
}

// Pause is SIGSTOP, Resume SIGCONT.
func (p *Process) Pause() error { return p.command.Process.Signal(syscall.SIGSTOP) }

// Resume is SIGCONT.
func (p *Process) Resume() error { return p.command.Process.Signal(syscall.SIGCONT) }

// Ack lets the child ack the rows it holds, and those to come.
func (p *Process) Ack() error {
	_, err := io.WriteString(p.stdin, "ack\n")
	return err
}

// Done is closed when the process has ended, by itself or not, and everything it delivered is in the journal.
func (p *Process) Done() <-chan struct{} { return p.done }

// Kill is SIGKILL; it waits until the process is gone and everything it delivered is in the journal. A second call does
// nothing.
func (p *Process) Kill() {
	if p.ended {
		return
	}
	p.ended = true
	_ = p.command.Process.Kill() // it may have ended by itself
	p.reading.Wait()
	_ = p.command.Wait() // "killed" is what it says
}

// Said is what the child wrote to its standard error.
func (p *Process) Said() string { return p.said.String() }

type said struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *said) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(b)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}
