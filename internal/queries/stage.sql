-- stage appends ids to the stored pending list ahead of a save that would be too long for one message. Until that save
-- moves the frontier they stand behind it, where a reader ignores them. The same fence as save.
--
-- $1 consumer, $2 shard, $3 term, $4 session token, $5 how many stored ids to keep, $6 ids to append
UPDATE "public"."outbox_cursors"
SET pending = pending[: $5::integer] || $6::bigint[]
WHERE consumer_id = $1::bigint
	AND shard = $2::smallint
	AND term = $3::bigint
	AND current_setting('pgoutbox.session', true) = $4::text
