package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// binaries is a directory with initdb, pg_ctl and postgres, and the version of these.
type binaries struct {
	dir   string
	major int
}

// binaryDirs are where distributions put the server, which is seldom on PATH.
var binaryDirs = []string{
	"/usr/lib/postgresql/*/bin", // Debian, Ubuntu
	"/usr/pgsql-*/bin",          // the project's own packages for Red Hat
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/home/linuxbrew/.linuxbrew/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/usr/libexec/postgresql*", // Alpine
}

// findBinaries returns what the directory holds, "": what PATH holds, else the newest server installed, of the major version wanted (0: any).
func findBinaries(ctx context.Context, dir string, want int) (binaries, error) {
	if dir != "" {
		return inspectBinaries(ctx, dir)
	}
	if dir := os.Getenv("PGOUTBOX_TEST_BINDIR"); dir != "" {
		b, err := inspectBinaries(ctx, dir)
		if err != nil {
			return binaries{}, fmt.Errorf("PGOUTBOX_TEST_BINDIR: %w", err)
		}
		if !b.serves(want) {
			return binaries{}, fmt.Errorf("PGOUTBOX_TEST_BINDIR %s holds PostgreSQL %d", dir, b.major)
		}
		return b, nil
	}
	if initdb, err := exec.LookPath("initdb"); err == nil {
		if target, err := filepath.EvalSymlinks(initdb); err == nil {
			initdb = target // PATH often has links to a few programs of a directory that has them all
		}
		if b, err := inspectBinaries(ctx, filepath.Dir(initdb)); err == nil && b.serves(want) {
			return b, nil
		}
	}
	var found []binaries
	for _, pattern := range binaryDirs {
		dirs, _ := filepath.Glob(pattern) // the only error is a bad pattern
		for _, dir := range dirs {
			if b, err := inspectBinaries(ctx, dir); err == nil {
				found = append(found, b)
			}
		}
	}
	if len(found) == 0 {
		return binaries{}, errors.New("no directory on PATH or of the usual ones holds initdb, pg_ctl and postgres")
	}
	slices.SortStableFunc(found, func(a, b binaries) int { return b.major - a.major })
	for _, b := range found {
		if b.serves(want) {
			return b, nil
		}
	}
	var majors []string
	for _, b := range found {
		majors = append(majors, strconv.Itoa(b.major))
	}
	return binaries{}, fmt.Errorf("only PostgreSQL %s is installed", strings.Join(majors, ", "))
}

func (b binaries) serves(want int) bool {
	return b.major >= oldest && (want == 0 || b.major == want)
}

var versionLine = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

func inspectBinaries(ctx context.Context, dir string) (binaries, error) {
	for _, name := range []string{"initdb", "pg_ctl", "postgres"} {
		if _, err := exec.LookPath(filepath.Join(dir, name)); err != nil {
			return binaries{}, err
		}
	}
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return binaries{}, fmt.Errorf("ask %s/postgres for its version: %w", dir, err)
	}
	m := versionLine.FindSubmatch(out)
	if m == nil {
		return binaries{}, fmt.Errorf("%s/postgres does not tell its version", dir)
	}
	major, err := strconv.Atoi(string(m[1]))
	if err != nil {
		return binaries{}, fmt.Errorf("%s/postgres does not tell its version: %w", dir, err)
	}
	return binaries{dir: dir, major: major}, nil
}
