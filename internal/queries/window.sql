-- window returns the rows of a range of ids, which bounds the rows that the server looks at whatever the filter lets
-- through. A payload over the limit comes back NULL, with its size, to be read alone. Rows with an id up to the old mark
-- whose transaction had ended before the oldest open one were delivered by the batches before.
--
-- $1 above this id, $2 up to this id, $3 topic or NULL, $4 shards of $5 or NULL for all, $6 created no earlier than
-- (microseconds since 1970) or NULL, $7 payload limit in bytes, $8 old upper mark, $9 oldest transaction of interest,
-- $10 rows at most
SELECT id, xid, slot, created_at, topic, key, uuid, metadata, octet_length(payload),
	CASE WHEN octet_length(payload) <= $7::integer THEN payload END
FROM "public"."outbox"
WHERE id > $1::bigint
	AND id <= $2::bigint
	AND (id > $8::bigint OR xid >= $9::xid8)
	AND ($3::text IS NULL OR topic = $3::text)
	AND ($4::integer[] IS NULL OR slot % $5::integer = ANY ($4::integer[]))
	AND ($6::bigint IS NULL OR created_at >= timestamptz 'epoch' + $6::bigint * interval '1 microsecond')
ORDER BY id
LIMIT $10::bigint
