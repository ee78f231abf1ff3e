-- park stores the position of a shard and, in the same transaction, the rows that it passes undelivered: neither can be seen,
-- or survive a crash, without the other. No row returned: the term or the session is no longer ours, and nothing changed. It
-- must be committed synchronously.
--
-- $1 session token, $2 consumer, $3 shard, $4 term, $5 to $8 after (epoch, low, high, snapshot), $9 to $12 upto (NULL between
-- batches), $13 last id, $14 how many stored pending ids to drop from the front, $15 ids to append; then arrays with an element
-- for each row: $16 ids, $17 transactions, $18 attempts, $19 microseconds since the first failure, $20 whether its key is parked
-- with it, $21 what went wrong last
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
	RETURNING consumer_id, shard
)
INSERT INTO "public"."outbox_parked" (consumer_id, row_id, xid, shard, key, whole_key, attempts, last_error, first_failed_at)
SELECT saved.consumer_id, v.row_id, v.xid::xid8, saved.shard, o.key, v.whole_key, v.attempts, v.last_error,
	now() - v.age * interval '1 microsecond'
FROM saved
CROSS JOIN unnest($16::bigint[], $17::text[], $18::integer[], $19::bigint[], $20::boolean[], $21::text[])
	AS v (row_id, xid, attempts, age, whole_key, last_error)
LEFT JOIN "public"."outbox" AS o ON o.id = v.row_id
ON CONFLICT (consumer_id, row_id) DO UPDATE
SET xid = excluded.xid,
	key = excluded.key,
	whole_key = excluded.whole_key,
	attempts = excluded.attempts,
	last_error = excluded.last_error,
	first_failed_at = excluded.first_failed_at,
	parked_at = excluded.parked_at,
	unpark = false
RETURNING row_id
