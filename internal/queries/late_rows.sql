-- late_rows returns the next rows, by id, that finished transactions left at or below the mark. Without it a transaction
-- that commits after its neighbours would never be read. Read per transaction: one predicate over all of them scans the
-- whole history, and so does xid = … with an order by id alone, where statistics promise many rows a transaction: the planner
-- then walks the primary key. A row that the filter does not want comes back with its id alone, so the caller sees how far
-- it got.
--
-- $1 xids, $2 above this id, $3 mark, $4 rows to look at, $5 topic or NULL, $6 shards of $7 or NULL for all, $8 created
-- no earlier than (microseconds since 1970) or NULL, $9 payload limit in bytes
SELECT late.id, o.xid, o.slot, o.created_at, o.topic, o.key, o.uuid, o.metadata, octet_length(o.payload),
	CASE WHEN octet_length(o.payload) <= $9::integer THEN o.payload END
FROM (
	SELECT of_one.id
	FROM unnest($1::xid8[]) AS finished (xid)
	CROSS JOIN LATERAL (
		SELECT id
		FROM "public"."outbox"
		WHERE (xid, id) > (finished.xid, $2::bigint)
			AND (xid, id) <= (finished.xid, $3::bigint)
		ORDER BY xid, id
		LIMIT $4::bigint
	) AS of_one
	ORDER BY of_one.id
	LIMIT $4::bigint
) AS late
LEFT JOIN "public"."outbox" AS o ON o.id = late.id
	AND ($5::text IS NULL OR o.topic = $5::text)
	AND ($6::integer[] IS NULL OR o.slot % $7::integer = ANY ($6::integer[]))
	AND ($8::bigint IS NULL OR o.created_at >= timestamptz 'epoch' + $8::bigint * interval '1 microsecond')
ORDER BY late.id
