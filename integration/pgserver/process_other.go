//go:build !unix

package pgserver

import (
	"os"
	"os/exec"
	"os/signal"
)

// account is who runs a server's programs: here always the caller.
type account struct{}

func serverAccount() (account, error) { return account{}, nil }

func ownerOf(string) (account, error) { return account{}, nil }

func (account) own(string) error { return nil }

func (account) runs(*exec.Cmd) {}

func detach(*exec.Cmd) {}

func kill(pid int) error {
	p, err := os.FindProcess(pid)
	if err != nil {
		return nil // gone already
	}
	return p.Kill()
}

func ignoreSignals() { signal.Ignore(os.Interrupt) }
