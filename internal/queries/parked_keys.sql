-- parked_keys returns the keys whose rows are parked rather than delivered, by shard.
--
-- $1 consumer, $2 shards
SELECT DISTINCT shard, key
FROM "public"."outbox_parked"
WHERE consumer_id = $1::bigint
	AND shard = ANY ($2::smallint[])
	AND whole_key
	AND key IS NOT NULL
