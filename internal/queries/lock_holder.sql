-- lock_holder returns who holds an advisory lock of this database: its process and the name it gave itself.
--
-- $1 key
SELECT l.pid, coalesce(a.application_name, '')
FROM pg_locks AS l
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
	AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
	AND l.objsubid = 1
	AND l.classid::bigint = (($1::bigint >> 32) & 4294967295)
	AND l.objid::bigint = ($1::bigint & 4294967295)
	AND l.granted
LIMIT 1
