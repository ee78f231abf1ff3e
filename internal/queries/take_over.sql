-- take_over begins a new term for shards whose locks the session has just got, and returns the stored positions. A write
-- of the term before finds its term gone and changes nothing. It must be committed synchronously: a term that a crash
-- could take back would be handed out twice. A shard without a row has been removed. The last two columns tell how the term
-- before ended: who led, and whether it gave the shard back.
--
-- $1 consumer, $2 shards, $3 owner, $4 session token
UPDATE "public"."outbox_cursors" AS c
SET term = c.term + 1,
	owner = $3::text,
	released = false,
	updated_at = now()
FROM (
	SELECT shard, owner, released
	FROM "public"."outbox_cursors"
	WHERE consumer_id = $1::bigint
		AND shard = ANY ($2::smallint[])
	FOR UPDATE
) AS before
WHERE c.consumer_id = $1::bigint
	AND c.shard = before.shard
	AND current_setting('pgoutbox.session', true) = $4::text
RETURNING c.shard, c.term,
	c.after_epoch, c.after_low, c.after_high, c.after_snapshot::text,
	c.upto_epoch, c.upto_low, c.upto_high, c.upto_snapshot::text,
	c.last_id, c.pending::text, c.suspect_id, c.suspect_deaths, before.owner, before.released
