-- release says of shards that nothing of them is out any more, so the next leader need not suspect any row. The same fence as
-- save.
--
-- $1 session token, $2 consumer, $3 shards, $4 the term of each
UPDATE "public"."outbox_cursors" AS c
SET released = true,
	suspect_id = NULL,
	suspect_deaths = 0
FROM unnest($3::smallint[], $4::bigint[]) AS v (shard, term)
WHERE c.consumer_id = $2::bigint
	AND c.shard = v.shard
	AND c.term = v.term
	AND current_setting('pgoutbox.session', true) = $1::text
