//go:build !unix

package torture

import "syscall"

// There is none; os.Process.Signal says so.
const (
	stopSignal     = syscall.Signal(0)
	continueSignal = syscall.Signal(0)
)
