-- rebase begins the epoch of this server.
--
-- $1 epoch, $2 system identifier, $3 the first id that is handed out in it
INSERT INTO "public"."outbox_epochs" (epoch, system_identifier, first_id)
VALUES ($1::integer, $2::bigint, $3::bigint)
