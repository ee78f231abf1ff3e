-- create_consumer creates a consumer and the cursor of each shard, or nothing when another process was first. All shards
-- start at the same position, so one scan serves them.
--
-- $1 group, $2 topic, $3 shards, $4 start_at in microseconds since 1970 or NULL, $5 to $8 after (epoch, low, high,
-- snapshot), $9 to $12 upto or NULL
WITH created AS (
	INSERT INTO "public"."outbox_consumers" (group_name, topic, shards, start_at)
	VALUES ($1::text, $2::text, $3::smallint, timestamptz 'epoch' + $4::bigint * interval '1 microsecond')
	ON CONFLICT (group_name, topic) DO NOTHING
	RETURNING id, shards
)
INSERT INTO "public"."outbox_cursors" (consumer_id, shard,
	after_epoch, after_low, after_high, after_snapshot,
	upto_epoch, upto_low, upto_high, upto_snapshot)
SELECT created.id, shard,
	$5::integer, $6::bigint, $7::bigint, $8::pg_snapshot,
	$9::integer, $10::bigint, $11::bigint, $12::pg_snapshot
FROM created
CROSS JOIN generate_series(0, created.shards - 1) AS shard
