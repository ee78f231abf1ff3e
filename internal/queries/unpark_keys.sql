-- unpark_keys extends what was asked for to whole keys: where a key was parked, its rows come back together, or later ones
-- would overtake earlier ones.
--
-- $1 consumer, $2 shard
UPDATE "public"."outbox_parked"
SET unpark = true
WHERE consumer_id = $1::bigint
	AND shard = $2::smallint
	AND whole_key
	AND NOT unpark
	AND key IN (
		SELECT key
		FROM "public"."outbox_parked"
		WHERE consumer_id = $1::bigint
			AND shard = $2::smallint
			AND whole_key
			AND unpark
	)
