-- epoch returns the newest epoch and the server it belongs to, NULL when the server would not tell.
SELECT epoch, system_identifier
FROM "public"."outbox_epochs"
ORDER BY epoch DESC
LIMIT 1
