-- unparked_shards returns the shards with parked rows that are to be delivered again.
SELECT DISTINCT consumer_id, shard
FROM "public"."outbox_parked"
WHERE unpark
