-- rows_by_id reads rows again: those that were pending when a shard was taken over, and those whose payload was not kept.
-- A row that is gone has no line.
--
-- $1 ids, $2 payload limit in bytes
SELECT id, xid, slot, created_at, topic, key, uuid, metadata, octet_length(payload),
	CASE WHEN octet_length(payload) <= $2::integer THEN payload END
FROM "public"."outbox"
WHERE id = ANY ($1::bigint[])
ORDER BY id
