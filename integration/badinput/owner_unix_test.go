//go:build unix

package badinput

import (
	"os"
	"syscall"
	"testing"
)

// owner gives a file to whom its directory belongs: as root, the server runs as somebody else.
func owner(t *testing.T, like, file string) {
	t.Helper()
	info, err := os.Stat(like)
	if err != nil {
		t.Fatal(err)
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok || os.Geteuid() != 0 {
		return
	}
	if err := os.Chown(file, int(stat.Uid), int(stat.Gid)); err != nil {
		t.Fatal(err)
	}
}
