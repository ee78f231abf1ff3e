-- The schema of watermill-pgoutbox, written for "public"."outbox". Migrate and SchemaSQL replace exactly the
-- double-quoted names. Every statement may run again: it changes nothing that is already there.

CREATE SCHEMA IF NOT EXISTS "public";

-- One row is one message. Writers insert topic, key, uuid, metadata and payload; the server fills in the rest.
--
-- xid and id are the last columns on purpose, in this order: PostgreSQL evaluates defaults in column order, so both are
-- drawn after the VALUES expressions have run, and waited for the locks that those take. Ids therefore grow in causal
-- order: whoever saw another transaction's commit draws a higher id than it did.
--
-- slot spreads the keys over shards (slot % shards = shard). The hash is the one PostgreSQL's own hash partitions rest
-- on. It is written inline: in an SQL function it costs a quarter of the insert rate.
CREATE TABLE IF NOT EXISTS "public"."outbox" (
	created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	slot       smallint    NOT NULL GENERATED ALWAYS AS ((hashtextextended(coalesce(key, uuid), 0) & 255)::smallint) STORED,
	topic      text        COLLATE "C" NOT NULL,
	key        text        COLLATE "C",
	uuid       text        COLLATE "C" NOT NULL DEFAULT gen_random_uuid()::text,
	metadata   jsonb       NOT NULL DEFAULT '{}',
	payload    bytea       NOT NULL DEFAULT '',
	xid        xid8        NOT NULL DEFAULT pg_current_xact_id(),
	id         bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME "public"."outbox_id_seq"),
	CONSTRAINT "outbox_pkey" PRIMARY KEY (id),
	CONSTRAINT "outbox_readable" CHECK (topic <> '' AND topic <> '#' AND jsonb_typeof(metadata) = 'object')
);

-- Finds the rows of a transaction that committed late, without a walk over the history.
CREATE INDEX IF NOT EXISTS "outbox_xid_id" ON "public"."outbox" (xid, id);

-- One row is one consumer: a consumer group reading one topic, or every topic ('#').
CREATE TABLE IF NOT EXISTS "public"."outbox_consumers" (
	id         bigint      NOT NULL GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME "public"."outbox_consumers_id_seq"),
	group_name text        COLLATE "C" NOT NULL,
	topic      text        COLLATE "C" NOT NULL,
	shards     smallint    NOT NULL CHECK (shards BETWEEN 1 AND 256),
	start_at   timestamptz, -- skip what is older and was visible at creation
	created_at timestamptz NOT NULL DEFAULT now(),
	CONSTRAINT "outbox_consumers_pkey" PRIMARY KEY (id),
	CONSTRAINT "outbox_consumers_name" UNIQUE (group_name, topic)
);

-- One row is the position of one shard of one consumer: a batch is what upto sees and after does not. upto is NULL
-- between batches. Everything of the batch up to last_id was emitted; pending lists, in emission order, the ids at or
-- before that point that are not acked. Written several times a second: no index but the key, and room for HOT updates.
CREATE TABLE IF NOT EXISTS "public"."outbox_cursors" (
	consumer_id    bigint      NOT NULL REFERENCES "public"."outbox_consumers" (id) ON DELETE CASCADE,
	shard          smallint    NOT NULL,
	term           bigint      NOT NULL DEFAULT 0,
	owner          text        NOT NULL DEFAULT '',
	after_epoch    integer     NOT NULL DEFAULT 1,
	after_low      bigint      NOT NULL DEFAULT 0,
	after_high     bigint      NOT NULL DEFAULT 0,
	after_snapshot pg_snapshot NOT NULL DEFAULT '1:1:', -- sees nothing
	upto_epoch     integer,
	upto_low       bigint,
	upto_high      bigint,
	upto_snapshot  pg_snapshot,
	last_id        bigint      NOT NULL DEFAULT 0,
	pending        bigint[]    NOT NULL DEFAULT '{}',
	updated_at     timestamptz NOT NULL DEFAULT now(),
	CONSTRAINT "outbox_cursors_pkey" PRIMARY KEY (consumer_id, shard)
) WITH (fillfactor = 30);

-- Since version 2. released: the last leader gave the shard back, nothing of it was out. suspect_id is the row that was out
-- alone when it was stored, suspect_deaths how many leaders were to end with it, that one included.
ALTER TABLE "public"."outbox_cursors"
	ADD COLUMN IF NOT EXISTS released       boolean NOT NULL DEFAULT true,
	ADD COLUMN IF NOT EXISTS suspect_id     bigint,
	ADD COLUMN IF NOT EXISTS suspect_deaths integer NOT NULL DEFAULT 0;

-- One row is one message that a consumer gave up, so that the cursor could pass. attempts is 0 when it was parked only
-- because it came behind a parked row of its key (whole_key). Setting unpark, which Unpark does, has the shard's leader deliver
-- it again. No reference to the outbox: a row may be gone by then. No index on key, which may be longer than one takes.
CREATE TABLE IF NOT EXISTS "public"."outbox_parked" (
	consumer_id     bigint      NOT NULL REFERENCES "public"."outbox_consumers" (id) ON DELETE CASCADE,
	row_id          bigint      NOT NULL,
	xid             xid8        NOT NULL, -- of the row; with it an id that was used twice is noticed
	shard           smallint    NOT NULL,
	key             text        COLLATE "C",
	whole_key       boolean     NOT NULL,
	attempts        integer     NOT NULL,
	last_error      text        NOT NULL DEFAULT '',
	first_failed_at timestamptz NOT NULL,
	parked_at       timestamptz NOT NULL DEFAULT now(),
	unpark          boolean     NOT NULL DEFAULT false,
	CONSTRAINT "outbox_parked_pkey" PRIMARY KEY (consumer_id, row_id)
);

-- Finds what is to be delivered again, nearly always nothing, without a look at the rest.
CREATE INDEX IF NOT EXISTS "outbox_parked_unpark" ON "public"."outbox_parked" (consumer_id, shard) WHERE unpark;

-- One row is one server that held this outbox: transaction ids start anew on another server, row ids go on.
CREATE TABLE IF NOT EXISTS "public"."outbox_epochs" (
	epoch             integer NOT NULL,
	system_identifier bigint, -- NULL: the server would not tell, the check is off
	first_id          bigint NOT NULL,
	CONSTRAINT "outbox_epochs_pkey" PRIMARY KEY (epoch)
);

DO $pgoutbox$
BEGIN
	INSERT INTO "public"."outbox_epochs" (epoch, system_identifier, first_id)
	SELECT 1, system_identifier, 1 FROM pg_control_system()
	ON CONFLICT (epoch) DO NOTHING;
EXCEPTION WHEN insufficient_privilege THEN
	INSERT INTO "public"."outbox_epochs" (epoch, first_id) VALUES (1, 1)
	ON CONFLICT (epoch) DO NOTHING;
END
$pgoutbox$;

-- outbox_publish writes one message with a JSON payload and returns its row id, from SQL, a trigger or any language. It
-- runs with the caller's rights: INSERT on the five writable columns and SELECT on id.
CREATE OR REPLACE FUNCTION "public"."outbox_publish"(topic text, payload jsonb, key text DEFAULT NULL, metadata jsonb DEFAULT '{}')
RETURNS bigint LANGUAGE sql VOLATILE AS $pgoutbox$
	INSERT INTO "public"."outbox" (topic, key, metadata, payload)
	VALUES ($1, nullif($3, ''), coalesce($4, '{}'), convert_to($2::text, 'UTF8'))
	RETURNING id;
$pgoutbox$;

-- outbox_publish_bytes is outbox_publish for any other payload. A name of its own: overloaded, the call
-- outbox_publish('t', '{}') would be ambiguous.
CREATE OR REPLACE FUNCTION "public"."outbox_publish_bytes"(topic text, payload bytea, key text DEFAULT NULL, metadata jsonb DEFAULT '{}')
RETURNS bigint LANGUAGE sql VOLATILE AS $pgoutbox$
	INSERT INTO "public"."outbox" (topic, key, metadata, payload)
	VALUES ($1, nullif($3, ''), coalesce($4, '{}'), $2)
	RETURNING id;
$pgoutbox$;
