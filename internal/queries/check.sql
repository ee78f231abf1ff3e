-- check returns what a reader needs to know before it starts: the server's version, whether it is a standby, whether the
-- schema is there, how many ids the sequence caches (more than 1 breaks the order of ids), and which rights are missing.
SELECT
	current_setting('server_version_num')::integer,
	pg_is_in_recovery(),
	(
		SELECT string_agg(name, ', ' ORDER BY name)
		FROM unnest(ARRAY[$pgoutbox$"public"."outbox"$pgoutbox$, $pgoutbox$"public"."outbox_id_seq"$pgoutbox$, $pgoutbox$"public"."outbox_consumers"$pgoutbox$,
			$pgoutbox$"public"."outbox_cursors"$pgoutbox$, $pgoutbox$"public"."outbox_epochs"$pgoutbox$, $pgoutbox$"public"."outbox_parked"$pgoutbox$]) AS t (name)
		WHERE to_regclass(name) IS NULL
	),
	coalesce((SELECT seqcache FROM pg_catalog.pg_sequence WHERE seqrelid = to_regclass($pgoutbox$"public"."outbox_id_seq"$pgoutbox$)), 1),
	concat_ws(', ',
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox"$pgoutbox$ END,
		CASE WHEN NOT has_sequence_privilege(to_regclass($pgoutbox$"public"."outbox_id_seq"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox_id_seq"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_consumers"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox_consumers"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_consumers"$pgoutbox$), 'INSERT')
			THEN $pgoutbox$INSERT ON "public"."outbox_consumers"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_cursors"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox_cursors"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_cursors"$pgoutbox$), 'INSERT')
			THEN $pgoutbox$INSERT ON "public"."outbox_cursors"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_cursors"$pgoutbox$), 'UPDATE')
			THEN $pgoutbox$UPDATE ON "public"."outbox_cursors"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_epochs"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox_epochs"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_parked"$pgoutbox$), 'SELECT')
			THEN $pgoutbox$SELECT ON "public"."outbox_parked"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_parked"$pgoutbox$), 'INSERT')
			THEN $pgoutbox$INSERT ON "public"."outbox_parked"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_parked"$pgoutbox$), 'UPDATE')
			THEN $pgoutbox$UPDATE ON "public"."outbox_parked"$pgoutbox$ END,
		CASE WHEN NOT has_table_privilege(to_regclass($pgoutbox$"public"."outbox_parked"$pgoutbox$), 'DELETE')
			THEN $pgoutbox$DELETE ON "public"."outbox_parked"$pgoutbox$ END)
