-- late_xids looks at a bounded chunk of the rows whose transaction had not ended, and was not listed as running, at the
-- last batch's snapshot, and returns those transactions that drew an id at or below its mark: their rows lie behind the
-- walk over the ids. Returns also where the chunk ended; no row: it was empty.
--
-- $1, $2 above this (xid, id), $3 below this xid, $4 mark, $5 rows to look at, $6 no id below this
WITH chunk AS MATERIALIZED (
	SELECT xid, id
	FROM "public"."outbox"
	WHERE (xid, id) > ($1::xid8, $2::bigint)
		AND xid < $3::xid8
	ORDER BY xid, id
	LIMIT $5::bigint
)
SELECT furthest.xid, furthest.id,
	(SELECT count(*) FROM chunk),
	(SELECT string_agg(DISTINCT xid::text, ',') FROM chunk WHERE id BETWEEN $6::bigint AND $4::bigint)
FROM (SELECT xid, id FROM chunk ORDER BY xid DESC, id DESC LIMIT 1) AS furthest
