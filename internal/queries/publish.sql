-- publish stores messages in the order of the arrays; 0 rows is impossible. The rows draw their ids in that order: defaults
-- are evaluated above the ordered subquery, which the planner does not even have to sort, because a function scan with
-- ordinality already comes in order. It reads no table, so it adds no read dependency to a serializable transaction, and
-- needs no right but INSERT on the five columns. The casts by way of text[] let the same statement take pgx's typed arrays
-- and the array literals that database/sql drivers send as text.
--
-- $1 topic, $2 keys ('' = no key), $3 uuids, $4 metadata as JSON texts, $5 payloads
INSERT INTO "public"."outbox" (topic, key, uuid, metadata, payload)
SELECT $1::text, nullif(m.key, ''), m.uuid, m.metadata, m.payload
FROM unnest($2::text[], $3::text[], $4::text[]::jsonb[], $5::bytea[]) WITH ORDINALITY AS m (key, uuid, metadata, payload, position)
ORDER BY m.position;
