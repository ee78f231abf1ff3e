-- tick_stray returns the highest committed id, 0 in an empty table. Ids above the sequence exist (COPY with ids, a setval
-- that came late); the tick's upper mark is raised over them. Not part of every tick: it walks over all uncommitted
-- rows at the end of the index.
SELECT coalesce(max(id), 0)
FROM "public"."outbox"
