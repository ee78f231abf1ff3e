package pgoutbox

import "errors"

// ErrClosed is returned by everything that is called after Close. Nothing was sent to the database: a transaction that was
// to be used is as usable as before.
var ErrClosed = errors.New("pgoutbox: closed")

// ErrNoTransaction is returned by Publish when the Publisher has no pool of its own, is not bound to a transaction, and
// finds none in the contexts of the messages. Nothing was sent to the database.
var ErrNoTransaction = errors.New("pgoutbox: no transaction in the messages' contexts (see ContextWithTx) and no pool")

// ErrUnknownOutcome is wrapped by the error of a Publish outside a transaction whose statement was sent and whose answer was
// lost: the connection broke, or a context ended meanwhile. All its messages are stored, or none. Publishing them again is
// right for consumers that are idempotent, which delivery at least once asks of them anyway; the UUIDs tell the copies.
//
// Within a pgx.Tx or a *sql.Tx it does not appear: there a lost answer means that the transaction cannot commit any more.
// Whether a Commit that failed took effect is what your driver's error has to tell.
var ErrUnknownOutcome = errors.New("pgoutbox: unknown outcome")

// ErrLeadershipLost is the cause of a message's context when another process may lead the shard by now. A write that
// returns it changed nothing; un-acked messages are delivered again by the next leader.
var ErrLeadershipLost = errors.New("pgoutbox: leadership lost")

// ErrPooledConnection is returned by the first call of a Subscriber, a PublisherBridge or a Leader whose lock session does not
// talk to the server itself: a pooler that hands one server connection to many clients would hand on our locks, too.
// Nothing was locked or changed. Give a DSN that leads to the server directly as LockConn, or set AllowPooler if the pooler
// is in session mode.
var ErrPooledConnection = errors.New("pgoutbox: a pooler stands between us and the server")

// ErrPermanent marks a failure that no retry will mend. A destination Publisher of a PublisherBridge or of RouteByTopic, or a handler
// under ReportErrors, that returns an error wrapping it has the row parked at once, whatever MaxAttempts is: it stands in the
// table of parked rows with the error's text, and is delivered again after Unpark only.
var ErrPermanent = errors.New("pgoutbox: permanent failure")
