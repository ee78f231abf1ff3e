package pgoutbox

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// snapshot says which rows a reader could see at one tick: the transactions that had ended (pg_snapshot in chapter 9.27
// of the PostgreSQL manual), and two marks of the id sequence, read before and after. It is a value; nothing changes it.
//
// low and high enclose the instant of the snapshot. A row outside it has an id above low, or belongs to a transaction that
// was running, or had yet to begin, at the tick. An honest row inside it has an id up to high; a row above that was not
// numbered by the sequence and is not visible until high was raised over it.
type snapshot struct {
	epoch     int32 // the server the transaction ids belong to: another one starts them anew
	first     int64 // of its epoch: what has a lower id had ended when the epoch began
	low, high int64
	xmax      uint64   // nothing from here on had ended
	running   []uint64 // ascending, below xmax: had not ended either
}

// sawNothing is the position of a consumer that reads from the beginning. Transaction ids below 3 are never handed out.
func sawNothing() snapshot { return snapshot{epoch: firstEpoch, xmax: 1} }

const firstEpoch = 1

// parseSnapshot reads PostgreSQL's text form, xmin:xmax:xip,xip,….
func parseSnapshot(text string) (snapshot, error) {
	parts := strings.Split(text, ":")
	if len(parts) != 3 {
		return snapshot{}, fmt.Errorf("snapshot %q has %d parts, want xmin:xmax:xip", text, len(parts))
	}
	xmin, err := strconv.ParseUint(parts[0], 10, 64)
	if err != nil {
		return snapshot{}, fmt.Errorf("snapshot %q: xmin: %w", text, err)
	}
	s := snapshot{epoch: firstEpoch}
	if s.xmax, err = strconv.ParseUint(parts[1], 10, 64); err != nil {
		return snapshot{}, fmt.Errorf("snapshot %q: xmax: %w", text, err)
	}
	if parts[2] != "" {
		for part := range strings.SplitSeq(parts[2], ",") {
			xid, err := strconv.ParseUint(part, 10, 64)
			if err != nil {
				return snapshot{}, fmt.Errorf("snapshot %q: xip: %w", text, err)
			}
			s.running = append(s.running, xid)
		}
	}
	inOrder := slices.IsSortedFunc(s.running, func(a, b uint64) int {
		if a == b {
			return -1 // a repeated id is as wrong as a descending one
		}
		return cmp.Compare(a, b)
	})
	outside := slices.ContainsFunc(s.running, func(xid uint64) bool { return xid < xmin || xid >= s.xmax })
	if xmin == 0 || xmin > s.xmax || !inOrder || outside {
		return snapshot{}, fmt.Errorf("snapshot %q is not in order", text)
	}
	return s, nil
}

// text is the snapshot in PostgreSQL's form, as the cursor row stores it.
func (s snapshot) text() string {
	xmin := s.xmax
	if len(s.running) > 0 {
		xmin = s.running[0]
	}
	out := strconv.AppendUint(nil, xmin, 10)
	out = append(out, ':')
	out = strconv.AppendUint(out, s.xmax, 10)
	out = append(out, ':')
	for i, xid := range s.running {
		if i > 0 {
			out = append(out, ',')
		}
		out = strconv.AppendUint(out, xid, 10)
	}
	return string(out)
}

// sees reports whether transaction xid had ended. Whether it committed, the server decides: rows of a rolled-back
// transaction are never returned by a query.
func (s snapshot) sees(xid uint64) bool {
	if xid >= s.xmax {
		return false
	}
	_, running := slices.BinarySearch(s.running, xid)
	return !running
}

// visible reports whether a committed row belongs to what the snapshot saw. The bound on the id holds back rows whose
// transaction id proves nothing, such as rows copied in from an archive, until high was raised over them. Transaction ids of
// another epoch are never compared: an id below the first of ours stands for itself, and one of a later epoch is above high.
func (s snapshot) visible(id int64, xid uint64) bool {
	return id <= s.high && (id < s.first || s.sees(xid))
}

// batch is the fixed set of rows that upto sees and after does not, in ascending order of id. Its rows never change, so a
// reader that stopped in the middle goes on exactly there, in this process or in another.
//
// The order is causal: a transaction that saw another's commit drew its ids later, so they are higher; and a snapshot that
// sees the second one sees the first.
type batch struct{ after, upto snapshot }

// has reports whether a committed row belongs to the batch.
func (b *batch) has(id int64, xid uint64) bool {
	return b.upto.visible(id, xid) && !b.after.visible(id, xid)
}

// crosses reports whether the batch ends on another server than it began on. Whatever ran on the first has ended then.
func (b *batch) crosses() bool { return b.after.epoch != b.upto.epoch }

// finished lists the transactions that were running at after and had ended at upto. Their rows may lie anywhere below
// after.low: only their ids say so.
func (b *batch) finished() []uint64 {
	if b.crosses() {
		return slices.Clone(b.after.running)
	}
	var out []uint64
	for _, xid := range b.after.running {
		if b.upto.sees(xid) {
			out = append(out, xid)
		}
	}
	return out
}

// quiet reports that no transaction ended between after and upto, so the batch is empty without asking the server. stray
// is the highest id known to lie above the sequence, 0 when there is none.
func (b *batch) quiet(stray int64) bool {
	return !b.crosses() && b.after.xmax == b.upto.xmax && len(b.finished()) == 0 && stray <= b.after.high
}

func (s snapshot) equal(other snapshot) bool {
	return s.epoch == other.epoch && s.low == other.low && s.high == other.high && s.xmax == other.xmax &&
		slices.Equal(s.running, other.running)
}
