package pgoutbox

import (
	"context"
	"fmt"
)

// move is a save that takes rows with it, in one transaction: to the parked rows, or from them.
type move struct {
	save save
	sql  string
	args []any // after those of the save
}

// mover is what a follower wants moved. All of it is called on the session goroutine.
type mover interface {
	look(context.Context, *session) (ok bool, err error) // an error ends the session
	prepare() (m move, wanted bool)                      // not wanted: there is nothing to store
	finish(stored bool)
}

// move has a shard's rows moved. Unless the lead ends first, finish is called.
func (g *leadership) move(l *lead, m mover) {
	g.enqueue(&task{ctx: l.ctx, fail: func(error) {}, run: func(ctx context.Context, s *session) error {
		stored, err := g.moveNow(ctx, s, m)
		if err == nil {
			m.finish(stored)
		}
		return err
	}})
}

func (g *leadership) moveNow(ctx context.Context, s *session, m mover) (bool, error) {
	if ok, err := m.look(ctx, s); !ok || err != nil {
		return false, err
	}
	v, wanted := m.prepare()
	if !wanted {
		return true, nil
	}
	staged, err := g.stage(ctx, s, v.save)
	if !staged || err != nil {
		return false, err
	}
	args := append([]any{s.token}, v.save.position()...)
	results, err := s.roundTrip(ctx, request{sql: v.sql, args: append(args, v.args...), durable: true})
	if err != nil {
		return false, fmt.Errorf("park or unpark rows of shard %d: %w", v.save.lead.shard, err)
	}
	if written, err := g.written(results[0]); !written || err != nil {
		return false, err
	}
	if len(results[0].Rows) == 0 {
		return false, v.save.superseded()
	}
	v.save.done(v.save)
	return true, nil
}
