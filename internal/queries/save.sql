-- save stores the position of one shard. The fence: it changes nothing unless the term is still ours and this is still the
-- session that holds the lock. 0 rows mean that leadership was lost.
--
-- $1 consumer, $2 shard, $3 term, $4 session token, $5 to $8 after (epoch, low, high, snapshot), $9 to $12 upto (NULL
-- between batches), $13 last id, $14 how many stored pending ids to drop from the front, $15 ids to append
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
WHERE consumer_id = $1::bigint
	AND shard = $2::smallint
	AND term = $3::bigint
	AND current_setting('pgoutbox.session', true) = $4::text
