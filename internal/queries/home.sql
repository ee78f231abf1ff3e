-- home returns what tells this database from every other but its standbys' copies of it.
SELECT concat_ws('/', system_identifier, (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()))
FROM pg_catalog.pg_control_system()
