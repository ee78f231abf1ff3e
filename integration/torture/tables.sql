-- The application's side of the torture: its entities, the ledger that the oracle is read from, and its triggers. Runs in
-- a fresh database, after the outbox's own schema.

-- One row is one key. version is raised under the row's lock by every message of the key.
CREATE TABLE torture_entity (
	key     text COLLATE "C" PRIMARY KEY,
	version bigint NOT NULL
) WITH (fillfactor = 50);

-- One row is one message, written in the message's own transaction: what is in here is what committed. The unique index
-- lets no two committed messages of a key share a version, so the causal order it tells is one.
CREATE TABLE torture_ledger (
	message bigint PRIMARY KEY,
	key     text COLLATE "C" NOT NULL, -- '' has no key
	version bigint NOT NULL,
	long    boolean NOT NULL           -- written by a transaction that stays open for seconds
);
CREATE UNIQUE INDEX torture_ledger_order ON torture_ledger (key, version) WHERE key <> '';

-- What transactions write that have nothing to do with the outbox.
CREATE TABLE torture_elsewhere (at timestamptz NOT NULL DEFAULT clock_timestamp());

-- A row in here becomes a message when its transaction commits, as change triggers do it.
CREATE TABLE torture_change (
	topic    text NOT NULL,
	key      text,
	uuid     text NOT NULL,
	metadata jsonb NOT NULL,
	payload  bytea NOT NULL
);

CREATE FUNCTION torture_emit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO outbox (topic, key, uuid, metadata, payload)
	VALUES (NEW.topic, NEW.key, NEW.uuid, NEW.metadata, NEW.payload);
	RETURN NULL;
END
$$;

CREATE CONSTRAINT TRIGGER torture_emit AFTER INSERT ON torture_change
DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION torture_emit();

-- torture_put_caught inserts twice: first the doomed payload in a block that fails and is caught, so that nobody may ever
-- see it, then the message in a block of its own, so that its row belongs to a subtransaction.
CREATE FUNCTION torture_put_caught(topic text, key text, uuid text, metadata jsonb, payload bytea, doomed bytea)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	BEGIN
		INSERT INTO outbox (topic, key, uuid, metadata, payload) VALUES ($1, $2, $3, $4, $6);
		RAISE EXCEPTION 'the block fails';
	EXCEPTION WHEN raise_exception THEN
		NULL;
	END;
	BEGIN
		INSERT INTO outbox (topic, key, uuid, metadata, payload) VALUES ($1, $2, $3, $4, $5);
	EXCEPTION WHEN check_violation THEN
		RAISE;
	END;
END
$$;
