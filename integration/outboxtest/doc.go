// Package outboxtest is what tests of an outbox on a real server share: an [Outbox] in a database of its own, a [Log] that
// remembers what the library reported, a [Sink] of what it delivered, a [Running] for what blocks, and ways to wait for an event
// instead of a time ([Eventually], [Next]).
//
// Whatever goes wrong in here fails the test; nothing returns an error that a test would only hand on. What a package knows
// about its own subject (a broker, a proxy, a verdict) stays in that package.
package outboxtest
