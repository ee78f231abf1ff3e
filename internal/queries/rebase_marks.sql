-- rebase_marks returns the last id that the sequence handed out, the highest id in the table, the highest id that a stored
-- position counts as visible, and a subscription that may still copy rows of the server before into the table, NULL: none.
SELECT
	(SELECT CASE WHEN is_called THEN last_value ELSE last_value - 1 END FROM "public"."outbox_id_seq"),
	(SELECT coalesce(max(id), 0) FROM "public"."outbox"),
	(SELECT coalesce(max(greatest(after_high, upto_high)), 0) FROM "public"."outbox_cursors"),
	(
		SELECT min(s.subname)
		FROM pg_catalog.pg_subscription AS s
		JOIN pg_catalog.pg_subscription_rel AS r ON r.srsubid = s.oid
		WHERE r.srrelid = $pgoutbox$"public"."outbox"$pgoutbox$::regclass
			AND s.subenabled
	)
