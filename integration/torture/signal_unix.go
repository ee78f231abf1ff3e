//go:build unix

package torture

import "syscall"

// What makes a process stand still, and go on.
const (
	stopSignal     = syscall.SIGSTOP
	continueSignal = syscall.SIGCONT
)
