-- lock tries the advisory lock of each shard and returns which ones it got. It never waits. Session locks stack, so the
-- caller never asks for a key that the session holds.
--
-- $1 keys
SELECT key, pg_try_advisory_lock(key)
FROM unnest($1::bigint[]) AS t (key)
