-- system_identifier returns what tells this server from every other, and from its own copies made by dump and restore.
SELECT system_identifier
FROM pg_catalog.pg_control_system()
