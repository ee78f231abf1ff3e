-- next_id returns the lowest committed id of a range, NULL when it holds none: one look-up jumps over a gap of any size.
--
-- $1 above this id, $2 up to this id
SELECT min(id)
FROM "public"."outbox"
WHERE id > $1::bigint
	AND id <= $2::bigint
