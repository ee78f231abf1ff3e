-- replica_state returns whether the server is a standby, of which database, and whether it has replayed the log up to a position.
--
-- $1 position
SELECT
	pg_is_in_recovery(),
	coalesce(pg_last_wal_replay_lsn() >= $1::pg_lsn, false),
	(
		SELECT concat_ws('/', system_identifier, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
		FROM pg_catalog.pg_control_system()
	)
