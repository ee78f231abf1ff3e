// Package pgoutbox is a transactional outbox in PostgreSQL for Watermill.
//
// An application writes its business rows and its messages in one transaction, with a [Publisher] or a plain INSERT. A
// [Subscriber] emits the committed messages to any Watermill Router, and a [PublisherBridge] publishes them straight into any
// message.Publisher. Several processes may do so: each shard of the keys is read by one of them, chosen by a PostgreSQL
// session advisory lock.
//
// # Promises
//
//  1. No loss: every committed row is delivered at least once to every consumer that exists when it commits.
//  2. No ghosts: nothing is delivered that did not commit.
//  3. Order per key: rows of one key are delivered in causal order, for transactions that lock the key, or insert or update its
//     row, before they insert the message. First deliveries never invert.
//  4. No stall: no open transaction delays anybody else's rows, whatever it has written, in whichever database.
//  5. Writers are free: no exclusive lock, no serialisation, no further round trip in the business transaction.
//  6. One emitter per shard, with an overlap of at most one item in flight per lane when a process dies, is paused or is cut
//     off. A stale process can never move a position.
//  7. Duplicates only after a crash, a lost lease or a nack: at most the rows un-acked, or acked since the last save.
//  8. A bad row blocks its own key at most.
//  9. Cost is flat: a poll does not get dearer with the backlog, the table, the number of shards or of idle consumers.
//  10. Nothing is held while user code runs: no transaction, no pooled connection, no lock but the shard's.
//
// A message that was published before its key was locked has no order with others of its key. A consumer with LiveOnly trades
// the first promise for being up to date.
//
// # How a row travels
//
// Each row stores the id of the transaction that wrote it and a number from a sequence. Sequence numbers become visible out of
// order, so a position is not a number but a snapshot (chapter 9.27, pg_snapshot): which transactions had ended. A tick takes a
// new snapshot; the rows that it sees and the one before does not are a batch, delivered in the order of their numbers.
// A transaction that is still open is simply in a later batch, so nothing waits for it. See snapshot.go and cursor.go.
//
// One session per Subscriber, Bridge or Leader holds its locks, takes its ticks and stores its positions. The server ends it
// after a lease of silence; the process stops trusting it a margin earlier. Each take-over begins a new term, and every write of
// a position names the term and the session, so one that comes late changes nothing. See leader.go.
//
// A reader fetches the batch in pages through the caller's pool, hands rows out so that no two of one key are on their way at
// the same time, and keeps two things: how far emission got, and which rows before that point are not acked. See reader.go.
//
// # Words
//
//   - consumer: a consumer group reading one topic, or all of them; it has a position of its own
//   - shard: the part of the keys that one lock covers; a consumer has a fixed number of them
//   - lead, leader: to hold a shard's lock; the process that does
//   - lease: how long a leader that falls silent keeps its shards
//   - term: what one leader's time with a shard is numbered by, ascending
//   - tick: one look at the server's snapshot
//   - batch: the rows between two ticks
//   - position, cursor: how far a shard is read, and what before that is not acked; the row that stores it
//   - lane: what keeps rows in order while it waits for an ack: a key for a Subscriber, a running call of Publish for a Bridge
package pgoutbox
