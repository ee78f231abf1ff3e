-- lock_holder returns who, other than peers, holds one of these advisory locks in this database: the process, and the name it
-- gave itself. Peers are known by theirs.
--
-- $1 keys, $2 how the names of peers begin
SELECT wanted.key, l.pid, coalesce(a.application_name, '')
FROM pg_catalog.pg_locks AS l
JOIN unnest($1::bigint[]) AS wanted (key) ON l.classid::bigint = ((wanted.key >> 32) & 4294967295)
	AND l.objid::bigint = (wanted.key & 4294967295)
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
	AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
	AND l.objsubid = 1
	AND l.granted
	AND NOT starts_with(coalesce(a.application_name, ''), $2::text)
LIMIT 1
