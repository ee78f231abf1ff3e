// Package faults breaks what stands between a reader and its server, and measures how long the damage lasts: processes are
// killed and paused ([Process]), the wire is silenced, cut and changed message by message ([Proxy]).
//
// The tests print what they measured and hold it to what is promised, with slack for a busy machine.
package faults
