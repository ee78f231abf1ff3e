-- tick_snapshot returns which transactions have ended. Its transaction writes nothing, so no xid of its own is missing
-- from the list.
SELECT pg_current_snapshot()::text
