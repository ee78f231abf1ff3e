-- tick_mark returns the last id that the sequence handed out, 0 before the first. The tick reads it before and after its
-- snapshot, each as a statement of its own: a row outside the snapshot then has an id above the first mark or belongs to
-- a transaction that was open, and a row inside has an id up to the second. Read by name: pg_sequence_last_value is
-- NULL without the right to read.
SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END
FROM "public"."outbox_id_seq"
