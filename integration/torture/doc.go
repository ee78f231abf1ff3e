// Package torture attacks a reader of the outbox and judges it by what the database itself says was committed.
//
// A [Workload] writes the way applications do, in plain SQL and through the Publisher: keys locked in three ways,
// transaction ids drawn early, savepoints and exception blocks that roll back, COPY, a trigger that inserts at commit,
// prepared transactions that another session finishes, and transactions that stay open for seconds. Every message has a
// row in a ledger table, written in the same transaction, so the oracle read from it is right even about a COMMIT whose
// answer was lost in a crash. Each key counts its messages in a version that is raised under the key's lock: that is the
// causal order.
//
// An [Entrant] is a [Reader] under test. Its deliveries go to a sink, which logs them and acknowledges them late and out
// of order. Meanwhile its processes are killed, restarted and robbed of their sessions, and the server crashes. At the
// end [Judge] compares the oracle with the log, and [Verdict.Broken] names the promises that did not hold.
//
// Two readers must fail, [Naive] and [Xmin], and one, [FullSet], must pass. A harness in which they do not is broken.
package torture
