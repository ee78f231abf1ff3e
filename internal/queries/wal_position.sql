-- wal_position returns how far the write-ahead log goes. A standby that has replayed so much shows whatever is visible now.
SELECT pg_current_wal_insert_lsn()::text
