package poolers

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// allowed are the two ways to run behind a pooler.
var allowed = []struct {
	name string
	make func(*testing.T) *pooled
	lock func(*pooled) (dsn string, pooler bool)
}{
	{"transaction mode with LockConn", transactions, func(p *pooled) (string, bool) { return p.direct, false }},
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
			l := &log{}
			sent := make(post, 10*len(mails))
			bridge, err := pgoutbox.NewPublisherBridge(pool, sent, pgoutbox.BridgeConfig{ConsumerGroup: "bridge", LockConn: dsn, AllowPooler: pooler}, l)
			if err != nil {
				t.Fatal(err)
			}
			leader, err := pgoutbox.NewLeader(pool, pgoutbox.LeaderConfig{Name: "leader", Shards: 4, LockConn: dsn, AllowPooler: pooler}, l)
			if err != nil {
				t.Fatal(err)
			}
			stopBridge := runs(t, bridge.Run)
			defer stopBridge()
			leads := make(chan pgoutbox.Lead, 4)
			stopLeader := runs(t, func(ctx context.Context) error {
				return leader.Run(ctx, func(ctx context.Context, lead pgoutbox.Lead) error {
					if _, err := lead.Exec(ctx, "SELECT 1"); err != nil {
						return err
					}
					leads <- lead
					<-ctx.Done()
					return nil
				})
			})
			defer stopLeader()
			left := maps.Clone(mails)
			late := time.After(patience)
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
			if locks := p.ask("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"); locks == "0" {
				t.Error("nothing is locked")
			}
			stopBridge()
			stopLeader()
			l.quiet(t)
			p.left()
		})
	}
}
