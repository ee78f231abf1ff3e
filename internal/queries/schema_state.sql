-- schema_state returns one row: what decides whether the schema is in place, and whether this role could put it there. It
-- reads catalogs only, and every role may read those, so it works for a role that has no right on the outbox itself.
-- missing counts a name as there when a relation, a constraint or a function bears it; the order is that of $3.
--
-- $1 schema, $2 table, $3 the names of everything that schema.sql creates
SELECT
	current_setting('server_version_num')::integer AS server_version,
	current_user::text AS role,
	current_database()::text AS database,
	has_database_privilege(current_database(), 'CREATE') AS may_create_schema,
	s.oid IS NOT NULL AS schema_exists,
	coalesce(has_schema_privilege(s.oid, 'CREATE'), false) AS may_create,
	t.oid IS NOT NULL AS table_exists,
	coalesce(pg_get_userbyid(t.relowner)::text, '') AS owner,
	coalesce(pg_has_role(t.relowner, 'USAGE'), false) AS may_alter,
	coalesce(obj_description(t.oid, 'pg_class'), '') AS comment,
	ARRAY(
		SELECT a.attname::text
		FROM pg_attribute AS a
		WHERE a.attrelid = t.oid AND a.attnum > 0 AND NOT a.attisdropped
	) AS columns,
	ARRAY(
		SELECT w.name
		FROM unnest($3::text[]) WITH ORDINALITY AS w (name, position)
		WHERE NOT EXISTS (SELECT FROM pg_class AS c WHERE c.relnamespace = s.oid AND c.relname = w.name)
		  AND NOT EXISTS (SELECT FROM pg_constraint AS c WHERE c.connamespace = s.oid AND c.conname = w.name)
		  AND NOT EXISTS (SELECT FROM pg_proc AS p WHERE p.pronamespace = s.oid AND p.proname = w.name)
		ORDER BY w.position
	) AS missing
FROM (SELECT $1::text AS schema_name, $2::text AS table_name) AS asked
LEFT JOIN pg_namespace AS s ON s.nspname = asked.schema_name
LEFT JOIN pg_class AS t ON t.relnamespace = s.oid AND t.relname = asked.table_name;
