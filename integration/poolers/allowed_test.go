package poolers

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// allowed are the two ways to run behind a pooler.
var allowed = []struct {
	name string
	make func(*testing.T) *pooled
	lock func(*pooled) (dsn string, pooler bool)
}{
	{"transaction mode with LockConn", transactions, func(p *pooled) (string, bool) { return p.DSN, false }},
	{"session mode with AllowPooler", sessions, func(*pooled) (string, bool) { return "", true }},
}

func TestBridgeAndLeaderWorkBehindAPooler(t *testing.T) {
	for _, way := range allowed {
		t.Run(way.name, func(t *testing.T) {
			p := way.make(t)
			dsn, pooler := way.lock(p)
			pool := p.pool(pgx.QueryExecModeCacheStatement)
			mails := hard(50)
			write(t, pool, mails, 4)
			l := outboxtest.NewLog(t)
			sent := make(post, 10*len(mails))
			bridge, err := pgoutbox.NewPublisherBridge(pool, sent, pgoutbox.BridgeConfig{ConsumerGroup: "bridge", LockConn: dsn, AllowPooler: pooler}, l)
			if err != nil {
				t.Fatal(err)
			}
			leader, err := pgoutbox.NewLeader(pool, pgoutbox.LeaderConfig{Name: "leader", Shards: 4, LockConn: dsn, AllowPooler: pooler}, l)
			if err != nil {
				t.Fatal(err)
			}
			running := outboxtest.Run(t, bridge.Run)
			defer running.End()
			leads := make(chan pgoutbox.Lead, 4)
			leading := outboxtest.Run(t, func(ctx context.Context) error {
				return leader.Run(ctx, func(ctx context.Context, lead pgoutbox.Lead) error {
					if _, err := lead.Exec(ctx, "SELECT 1"); err != nil {
						return err
					}
					leads <- lead
					<-ctx.Done()
					return nil
				})
			})
			defer leading.End()
			left := maps.Clone(mails)
			late := time.After(outboxtest.Patience)
			for shards := 0; len(left) > 0 || shards < 4; {
				select {
				case msg := <-sent:
					if want, ok := mails[msg.UUID]; !ok || !want.same(msg) {
						t.Errorf("message %q was sent changed", msg.UUID)
					}
					delete(left, msg.UUID)
				case <-leads:
					shards++
				case <-late:
					t.Fatalf("%d messages were never sent, %d shards led", len(left), shards)
				}
			}
			if locks := p.Text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"); locks == "0" {
				t.Error("nothing is locked")
			}
			running.End()
			leading.End()
			l.MustBeQuiet(t)
			p.left()
		})
	}
}
