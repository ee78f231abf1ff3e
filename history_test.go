package pgoutbox

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
)

// dice makes decisions out of bytes, so that one model serves a fuzzer and a random test.
type dice struct{ bytes []byte }

func randomDice(seed uint64, throws int) *dice {
	source := rand.New(rand.NewPCG(seed, 1))
	d := &dice{bytes: make([]byte, throws)}
	for i := range d.bytes {
		d.bytes[i] = byte(source.UintN(256))
	}
	return d
}

func (d *dice) left() bool { return len(d.bytes) > 0 }

// roll returns a number below sides, 0 when no bytes are left.
func (d *dice) roll(sides int) int {
	if len(d.bytes) == 0 || sides < 2 {
		return 0
	}
	b := d.bytes[0]
	d.bytes = d.bytes[1:]
	return int(b) % sides
}

// history is a server as far as a reader can tell: transactions that draw xids, take the locks of keys, insert rows and end,
// in any interleaving, with ticks between any two events.
type history struct {
	*dice

	moves  bool  // to another server, now and then
	epoch  epoch // that the reader knows of
	epochs []epoch
	moved  int    // servers so far
	strays bool   // some rows have an id that the sequence did not hand out
	drawn  int64  // the sequence's last value
	next   uint64 // the xid handed out next
	ended  uint64 // the highest xid that has ended
	open   []*transaction
	locks  map[string]*transaction
	rows   []*historyRow // of all transactions, in the order of their inserts
	byID   map[int64]*historyRow
}

type transaction struct {
	xid  uint64 // 0: none yet
	rows []*historyRow
}

type historyRow struct {
	id        int64
	xid       uint64
	key       string // "": none, so no order
	committed bool
	aborted   bool
	deleted   bool
}

const firstXid = 740

func newHistory(d *dice, strays bool) *history {
	return &history{
		dice: d, strays: strays, next: firstXid, ended: firstXid - 1, epoch: here, epochs: []epoch{here},
		locks: map[string]*transaction{}, byID: map[int64]*historyRow{},
	}
}

// event lets one thing happen.
func (h *history) event() {
	if len(h.open) == 0 {
		h.open = append(h.open, &transaction{})
		return
	}
	tx := h.open[h.roll(len(h.open))]
	switch h.roll(10) {
	case 0, 1:
		if len(h.open) < 5 {
			h.open = append(h.open, &transaction{})
		}
	case 2:
		h.assign(tx) // an earlier write, into some other table
	case 3, 4, 5:
		h.insert(tx, []string{"", "a", "b", "c"}[h.roll(4)])
	case 6, 7:
		h.end(tx, true)
	case 8:
		h.end(tx, h.roll(4) > 0)
	case 9:
		if h.strays {
			h.stray(tx)
		}
	}
}

func (h *history) assign(tx *transaction) {
	if tx.xid == 0 {
		tx.xid = h.next
		h.next++
	}
}

// insert takes the key's lock, unless somebody has it, and then draws xid and id, as the columns' order makes PostgreSQL do.
func (h *history) insert(tx *transaction, key string) {
	if key != "" {
		if holder := h.locks[key]; holder != nil && holder != tx {
			return
		}
		h.locks[key] = tx
	}
	h.assign(tx)
	h.drawn++
	for h.byID[h.drawn] != nil { // a stray row sits there: the insert failed and was tried again
		h.drawn++
	}
	h.add(&historyRow{id: h.drawn, xid: tx.xid, key: key}, tx)
}

func (h *history) add(row *historyRow, tx *transaction) {
	h.rows = append(h.rows, row)
	h.byID[row.id] = row
	tx.rows = append(tx.rows, row)
}

// stray inserts a row with an id of the writer's choice: in tx, or at once with a transaction id from another time or server.
func (h *history) stray(tx *transaction) {
	id := h.drawn + int64(h.roll(6))
	for _, row := range h.rows {
		id = max(id, row.id)
	}
	id += 1 + int64(h.roll(3))
	switch h.roll(4) {
	case 0, 1:
		h.assign(tx)
		h.add(&historyRow{id: id, xid: tx.xid}, tx)
		return
	case 2:
		h.add(&historyRow{id: id, xid: uint64(3 + h.roll(200)), committed: true}, &transaction{})
	case 3:
		h.add(&historyRow{id: id, xid: h.next + uint64(h.roll(30)), committed: true}, &transaction{})
	}
	writer := &transaction{} // the one that really wrote it
	h.open = append(h.open, writer)
	h.assign(writer)
	h.end(writer, true)
}

func (h *history) end(tx *transaction, commit bool) {
	h.ended = max(h.ended, tx.xid)
	for _, row := range tx.rows {
		row.committed, row.aborted = commit, !commit
	}
	for key, holder := range h.locks {
		if holder == tx {
			delete(h.locks, key)
		}
	}
	h.open = slices.DeleteFunc(h.open, func(other *transaction) bool { return other == tx })
}

// move changes to another server, which has what was committed and hands out other transaction ids. Some rows are written there
// before the first reader comes. It waits for those that write, as a lock on the table makes it, and begins an epoch.
func (h *history) move() {
	h.moved++
	for len(h.open) > 0 {
		h.end(h.open[0], false)
	}
	for _, row := range h.rows {
		h.drawn = max(h.drawn, row.id) // or the reader would refuse
	}
	h.next = uint64(3 + h.roll(2*firstXid))
	h.ended = h.next - 1
	for range h.roll(8) {
		h.event()
	}
	for _, tx := range slices.Clone(h.open) {
		if len(tx.rows) > 0 {
			h.end(tx, h.roll(4) > 0)
		}
	}
	for _, row := range h.rows {
		h.drawn = max(h.drawn, row.id)
	}
	h.epoch = epoch{number: h.epoch.number + 1, first: h.drawn + 1}
	h.epochs = append(h.epochs, h.epoch)
}

// settle ends everything that is open, and burns transaction ids up to the last one that a row bears.
func (h *history) settle() {
	for len(h.open) > 0 {
		h.end(h.open[0], true)
	}
	for _, row := range h.rows {
		for h.next <= row.xid {
			tx := &transaction{}
			h.assign(tx)
			h.end(tx, true)
		}
	}
}

// snapshot is what pg_current_snapshot() returns.
func (h *history) snapshot() string {
	var running []uint64
	for _, tx := range h.open {
		if tx.xid != 0 && tx.xid <= h.ended {
			running = append(running, tx.xid)
		}
	}
	slices.Sort(running)
	xmin := h.ended + 1
	list := make([]string, len(running))
	for i, xid := range running {
		list[i], xmin = strconv.FormatUint(xid, 10), min(xmin, xid)
	}
	return fmt.Sprintf("%d:%d:%s", xmin, h.ended+1, strings.Join(list, ","))
}

// oldest is pg_snapshot_xmin(pg_current_snapshot()): nothing below it is running.
func (h *history) oldest() uint64 {
	oldest := h.ended + 1
	for _, tx := range h.open {
		if tx.xid != 0 {
			oldest = min(oldest, tx.xid)
		}
	}
	return oldest
}

// committed returns the rows that a query finds now and that satisfy want, by id.
func (h *history) committed(want func(*historyRow) bool) []*historyRow {
	var out []*historyRow
	for _, row := range h.rows {
		if row.committed && !row.deleted && want(row) {
			out = append(out, row)
		}
	}
	slices.SortFunc(out, func(a, b *historyRow) int { return cmp.Compare(a.id, b.id) })
	return out
}

func (h *history) members(b *batch) []*historyRow {
	return h.committed(func(row *historyRow) bool { return b.has(row.id, row.xid) })
}

// predecessors returns the committed rows of the key that were inserted before row.
func (h *history) predecessors(row *historyRow) []*historyRow {
	var out []*historyRow
	for _, other := range h.rows {
		if other == row {
			break
		}
		if other.key == row.key && row.key != "" && other.committed {
			out = append(out, other)
		}
	}
	return out
}

// ticker reads ticks as the lock session does, one statement a step.
type ticker struct {
	*history

	high, stray int64
	n           uint64
	step        int
	low, text   string
	last        string
}

// advance runs the next statement of the tick, and returns the tick after its last one.
func (t *ticker) advance() (tick, bool) {
	mark := strconv.FormatInt(t.drawn, 10)
	t.step++
	switch t.step {
	case 1:
		t.low = mark
	case 2:
		t.text = t.history.snapshot()
	case 3:
		t.last = mark
	default:
		if t.n == 0 || t.roll(3) == 0 {
			t.probe()
		}
		return t.read(), true
	}
	return tick{}, false
}

// restart is a new session, which knows the stored positions only.
func (t *ticker) restart(high int64) { t.step, t.high, t.stray = 0, high, 0 }

// probe is the look for ids above the sequence.
func (t *ticker) probe() {
	for _, row := range t.committed(func(*historyRow) bool { return true }) {
		t.stray = max(t.stray, row.id)
	}
}

func (t *ticker) read() tick {
	out, err := readTick(t.low, t.text, t.last, t.epoch, t.high, t.stray)
	if err != nil {
		panic(err)
	}
	t.high, t.step = out.high, 0
	t.n++
	out.n = t.n
	return out
}

// whole reads a tick with nothing in between, the probe included.
func (t *ticker) whole() tick {
	t.step = 0
	for range 3 {
		t.advance()
	}
	t.probe()
	return t.read()
}
