-- take_over begins a new term for shards whose locks the session has just got, and returns the stored positions. A write
-- of the term before finds its term gone and changes nothing. It must be committed synchronously: a term that a crash
-- could take back would be handed out twice. A shard without a row has been removed.
--
-- $1 consumer, $2 shards, $3 owner, $4 session token
UPDATE "public"."outbox_cursors"
SET term = term + 1,
	owner = $3::text,
	updated_at = now()
WHERE consumer_id = $1::bigint
	AND shard = ANY ($2::smallint[])
	AND current_setting('pgoutbox.session', true) = $4::text
RETURNING shard, term,
	after_epoch, after_low, after_high, after_snapshot::text,
	upto_epoch, upto_low, upto_high, upto_snapshot::text,
	last_id, pending::text
