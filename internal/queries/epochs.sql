-- epochs returns the servers that held this outbox, the newest last; NULL: the server would not tell which it was.
SELECT epoch, system_identifier, first_id
FROM "public"."outbox_epochs"
ORDER BY epoch
