-- unparked_rows returns the next rows of a shard, by id, that are to be delivered again. The transaction is NULL when the row
-- is gone, or another one bears its id.
--
-- $1 consumer, $2 shard, $3 rows at most
SELECT p.row_id, o.xid::text, o.topic, o.key, octet_length(o.payload)
FROM "public"."outbox_parked" AS p
LEFT JOIN "public"."outbox" AS o ON o.id = p.row_id AND o.xid = p.xid
WHERE p.consumer_id = $1::bigint
	AND p.shard = $2::smallint
	AND p.unpark
ORDER BY p.row_id
LIMIT $3::bigint
