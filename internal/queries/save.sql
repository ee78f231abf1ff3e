-- save stores the positions of shards and returns those it stored. The fence: it changes nothing unless the term is still ours
-- and this is still the session that holds the locks. A shard that is not returned was lost. One statement for many shards:
-- each may have to wait for a lock on the table, and together they must not wait longer than the lease.
--
-- $1 session token, then arrays with an element for each shard: $2 consumers, $3 shards, $4 terms, $5 to $8 after (epoch,
-- low, high, snapshot), $9 to $12 upto (NULL between batches), $13 last ids, $14 how many stored pending ids to drop from the
-- front, $15 ids to append, each as the text of an array, $16 the rows that are out alone after an unclean end (NULL: none), $17 how
-- many leaders ended with them so far, this one counted
UPDATE "public"."outbox_cursors" AS c
SET after_epoch = v.after_epoch,
	after_low = v.after_low,
	after_high = v.after_high,
	after_snapshot = v.after_snapshot::pg_snapshot,
	upto_epoch = v.upto_epoch,
	upto_low = v.upto_low,
	upto_high = v.upto_high,
	upto_snapshot = v.upto_snapshot::pg_snapshot,
	last_id = v.last_id,
	pending = c.pending[v.dropped + 1 :] || v.pending::bigint[],
	suspect_id = v.suspect_id,
	suspect_deaths = v.suspect_deaths,
	updated_at = now()
FROM unnest($2::bigint[], $3::smallint[], $4::bigint[],
	$5::integer[], $6::bigint[], $7::bigint[], $8::text[],
	$9::integer[], $10::bigint[], $11::bigint[], $12::text[],
	$13::bigint[], $14::integer[], $15::text[],
	$16::bigint[], $17::integer[]) AS v (consumer_id, shard, term,
	after_epoch, after_low, after_high, after_snapshot,
	upto_epoch, upto_low, upto_high, upto_snapshot,
	last_id, dropped, pending,
	suspect_id, suspect_deaths)
WHERE c.consumer_id = v.consumer_id
	AND c.shard = v.shard
	AND c.term = v.term
	AND current_setting('pgoutbox.session', true) = $1::text
RETURNING c.consumer_id, c.shard
