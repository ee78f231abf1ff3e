-- unpark stores the position of a shard, with parked rows back among its pending ones, and in the same transaction removes them
-- from the parked ones. No row returned: the term or the session is no longer ours, and nothing changed. It must be committed
-- synchronously.
--
-- $1 session token, $2 consumer, $3 shard, $4 term, $5 to $8 after (epoch, low, high, snapshot), $9 to $12 upto (NULL between
-- batches), $13 last id, $14 how many stored pending ids to drop from the front, $15 ids to append, $16 ids of the parked rows
WITH saved AS (
	UPDATE "public"."outbox_cursors"
	SET after_epoch = $5::integer,
		after_low = $6::bigint,
		after_high = $7::bigint,
		after_snapshot = $8::pg_snapshot,
		upto_epoch = $9::integer,
		upto_low = $10::bigint,
		upto_high = $11::bigint,
		upto_snapshot = $12::pg_snapshot,
		last_id = $13::bigint,
		pending = pending[$14::integer + 1 :] || $15::bigint[],
		updated_at = now()
	WHERE consumer_id = $2::bigint
		AND shard = $3::smallint
		AND term = $4::bigint
		AND current_setting('pgoutbox.session', true) = $1::text
	RETURNING consumer_id
)
DELETE FROM "public"."outbox_parked" AS p
USING saved
WHERE p.consumer_id = saved.consumer_id
	AND p.row_id = ANY ($16::bigint[])
RETURNING p.row_id
