-- rebase_marks returns the highest id that a stored position counts as visible, and a subscription that may still copy rows of
-- the server before into the table, NULL: none.
SELECT
	(SELECT coalesce(max(greatest(after_high, upto_high)), 0) FROM "public"."outbox_cursors"),
	(
		SELECT min(s.subname)
		FROM pg_catalog.pg_subscription AS s
		JOIN pg_catalog.pg_subscription_rel AS r ON r.srsubid = s.oid
		WHERE r.srrelid = $pgoutbox$"public"."outbox"$pgoutbox$::regclass
			AND s.subenabled
	)
