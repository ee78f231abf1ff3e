-- xmax returns the transaction id from which on none has ended.
SELECT pg_snapshot_xmax(pg_current_snapshot())::text
