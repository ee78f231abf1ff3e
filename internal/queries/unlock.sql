-- unlock frees the lock of each shard and returns whether the session had held it; false means that somebody else freed
-- it, and nothing the session believes of itself can be trusted.
--
-- $1 keys
SELECT key, pg_advisory_unlock(key)
FROM unnest($1::bigint[]) AS t (key)
