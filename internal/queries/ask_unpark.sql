-- ask_unpark asks the leaders of a group's shards to deliver parked rows again.
--
-- $1 group, $2 the consumer's topic or NULL for all, $3 ids or NULL for all, $4 keys or NULL for all, $5 parked before (NULL:
-- whenever)
UPDATE "public"."outbox_parked" AS p
SET unpark = true
FROM "public"."outbox_consumers" AS c
WHERE c.group_name = $1::text
	AND ($2::text IS NULL OR c.topic = $2::text)
	AND p.consumer_id = c.id
	AND ($3::bigint[] IS NULL OR p.row_id = ANY ($3::bigint[]))
	AND ($4::text[] IS NULL OR p.key = ANY ($4::text[]))
	AND ($5::timestamptz IS NULL OR p.parked_at < $5::timestamptz)
