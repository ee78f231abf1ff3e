-- rebase_lock waits until no transaction is open that inserted rows, and lets none begin to: what is in the table then has ended.
LOCK TABLE "public"."outbox" IN SHARE ROW EXCLUSIVE MODE
