package pgoutbox

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// stored is the row of one shard in the cursor table: what the next leader starts from.
type stored struct {
	shard   int
	term    int64
	at      position
	pending []int64 // in emission order

	suspect    suspect
	owner      string // who led before
	released   bool   // and gave the shard back
	parkedKeys []string
}

// parseStored reads the columns of take_over.
func parseStored(columns [][]byte) (stored, error) {
	if len(columns) != 16 {
		return stored{}, fmt.Errorf("a cursor row has %d columns, want 16", len(columns))
	}
	var out stored
	shard, err := strconv.Atoi(string(columns[0]))
	if err != nil {
		return stored{}, fmt.Errorf("shard: %w", err)
	}
	out.shard = shard
	if out.term, err = strconv.ParseInt(string(columns[1]), 10, 64); err != nil {
		return stored{}, fmt.Errorf("term of shard %d: %w", shard, err)
	}
	after, err := parseStoredSnapshot(columns[2:6])
	if err != nil {
		return stored{}, fmt.Errorf("after of shard %d: %w", shard, err)
	}
	out.at = between(after)
	if columns[9] != nil {
		upto, err := parseStoredSnapshot(columns[6:10])
		if err != nil {
			return stored{}, fmt.Errorf("upto of shard %d: %w", shard, err)
		}
		out.at = position{batch: &batch{after: after, upto: upto}}
		if out.at.last, err = strconv.ParseInt(string(columns[10]), 10, 64); err != nil {
			return stored{}, fmt.Errorf("last id of shard %d: %w", shard, err)
		}
	}
	if out.pending, err = parseInt64Array(string(columns[11])); err != nil {
		return stored{}, fmt.Errorf("pending ids of shard %d: %w", shard, err)
	}
	if out.suspect, err = parseSuspect(columns[12:14]); err != nil {
		return stored{}, fmt.Errorf("suspect of shard %d: %w", shard, err)
	}
	out.owner = string(columns[14])
	if out.released, err = strconv.ParseBool(string(columns[15])); err != nil {
		return stored{}, fmt.Errorf("whether shard %d was released: %w", shard, err)
	}
	return out, nil
}

func parseStoredSnapshot(columns [][]byte) (snapshot, error) {
	s, err := parseSnapshot(string(columns[3]))
	if err != nil {
		return s, err
	}
	epoch, err := strconv.ParseInt(string(columns[0]), 10, 32)
	if err != nil {
		return s, fmt.Errorf("epoch: %w", err)
	}
	s.epoch = int32(epoch)
	if s.low, err = strconv.ParseInt(string(columns[1]), 10, 64); err != nil {
		return s, fmt.Errorf("lower mark: %w", err)
	}
	if s.high, err = strconv.ParseInt(string(columns[2]), 10, 64); err != nil {
		return s, fmt.Errorf("upper mark: %w", err)
	}
	return s, nil
}

func parseInt64Array(text string) ([]int64, error) {
	text = strings.Trim(text, "{}")
	out := []int64{}
	if text == "" {
		return out, nil
	}
	for part := range strings.SplitSeq(text, ",") {
		v, err := strconv.ParseInt(part, 10, 64)
		if err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	return out, nil
}

// args are the snapshot's columns in the order of the statements.
func (s snapshot) args() []any { return []any{int64(s.epoch), s.low, s.high, s.text()} }

// args are the position's columns: after, upto and the last id.
func (p position) args() []any {
	if p.atEnd() {
		return append(p.batch.upto.args(), nil, nil, nil, nil, int64(0))
	}
	return slices.Concat(p.batch.after.args(), p.batch.upto.args(), []any{p.last})
}

// save is what one shard wants stored.
type save struct {
	lead    *lead
	at      position
	pending []int64
	suspect suspect
	stored  int        // length of the pending list that the row holds now
	done    func(save) // called when it is stored
}

// A statement is kept to a few KB, so that it leaves the process in one piece: half a statement would keep the server waiting
// for the rest, and a server that waits for the rest of a message grants no lease.
const (
	saveBytes = 8 << 10
	saveChunk = 400 // pending ids
)

// stages are the statements that put a long pending list behind the one that counts, in chunks, each of which must have
// succeeded before the next is sent. The save that follows drops the list before it. A list that is not long has none.
func (v save) stages(sql, token string) []request {
	if len(v.pending) <= saveChunk {
		return nil
	}
	var out []request
	keep := v.stored
	for chunk := range slices.Chunk(v.pending, saveChunk) {
		out = append(out, request{sql: sql, args: []any{v.lead.consumer, v.lead.shard, v.lead.term, token, keep, chunk}})
		keep += len(chunk)
	}
	return out
}

// saveRequests packs saves into as few statements as their size allows. Each statement stores the saves of the same index.
func saveRequests(sql, token string, saves []save) (requests []request, packs [][]save) {
	for len(saves) > 0 {
		columns := make([][]any, len(saves[0].row()))
		n, size := 0, 0
		for n < len(saves) && size < saveBytes {
			for i, value := range saves[n].row() {
				columns[i] = append(columns[i], value)
				size += 20 // a number, or what separates
				if text, ok := value.(string); ok {
					size += len(text)
				}
			}
			n++
		}
		args := []any{token}
		for _, column := range columns {
			args = append(args, column)
		}
		requests = append(requests, request{sql: sql, args: args, frequent: true})
		packs = append(packs, saves[:n])
		saves = saves[n:]
	}
	return requests, packs
}

// row are the columns of one save.
func (v save) row() []any { return append(v.position(), v.suspect.args()...) }

// position are the columns that say where the shard stands.
func (v save) position() []any {
	drop, rest := dropAll, v.pending
	if len(v.pending) > saveChunk {
		drop, rest = v.stored, nil // the stages appended it
	}
	return slices.Concat([]any{v.lead.consumer, v.lead.shard, v.lead.term}, v.at.args(), []any{drop, string(int64Array(rest))})
}

// dropAll empties the stored list: no list is that long.
const dropAll = 1 << 30
