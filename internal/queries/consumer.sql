-- consumer returns a consumer by its name; no row: it was not created yet.
--
-- $1 group, $2 topic
SELECT id, shards, (extract(epoch FROM start_at) * 1000000)::bigint
FROM "public"."outbox_consumers"
WHERE group_name = $1::text
	AND topic = $2::text
