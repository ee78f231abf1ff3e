// Package pgserver finds or starts the servers that tests, the demo and the benchmarks talk to, so that none of them needs
// anything to be set up first.
//
// PostgreSQL comes from the first of these that can deliver:
//
//  1. PGOUTBOX_TEST_DSN, a superuser's connection string. Nothing is started or stopped; databases are created and dropped.
//  2. A Docker daemon, through dockertest and the official image.
//  3. The server's binaries on this machine: PATH, then the newest of /usr/lib/postgresql/*/bin, /usr/pgsql-*/bin, Homebrew
//     and Postgres.app. The server lives in a temporary directory and listens on a free loopback port. It trusts every
//     local connection and runs as postgres or nobody when the caller is root.
//
// A provider that cannot deliver is named with its reason in one line, and the next one is tried. Three variables narrow the
// choice: PGOUTBOX_TEST_PROVIDER (dsn, docker or local) makes one provider final, PGOUTBOX_TEST_VERSION asks for a major
// version, PGOUTBOX_TEST_BINDIR names the directory of the binaries.
//
// Redis comes from REDIS_URL, else redis-server on PATH, else Docker, else miniredis inside the process.
//
// # Nothing is left behind
//
// Close stops what Start started and removes its directory. When the process dies before it can (SIGKILL, a panic, a test
// that timed out), a reaper does the same: a second process of the same executable, in a session of its own, which reads a
// pipe that only this process holds open for writing. Containers are also removed by the daemon when they stop, and stop by
// themselves after an hour.
//
// # In tests
//
// All tests of one package share one server and have a database each, see [Run] and [Database]. A missing server fails the
// test with a sentence that says what to install; it never skips it.
package pgserver
