package pgoutbox

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

func TestSettingsHaveTheDocumentedDefaults(t *testing.T) {
	s, err := newSettings(new(pgxpool.Pool), SubscriberConfig{ConsumerGroup: "relay"})
	if err != nil {
		t.Fatal(err)
	}
	for name, pair := range map[string][2]any{
		"Schema": {s.names.schema, "public"}, "Table": {s.names.table, "outbox"}, "ConsumerGroup": {s.group, "relay"},
		"Shards": {s.shards, 0}, "StartFrom": {s.from, Earliest}, "LiveOnly": {s.liveOnly, false}, "Ordering": {s.ordering, OrderByKey},
		"MaxInFlight": {s.maxInFlight, 64}, "Window": {s.window, 10_000},
		"PollInterval": {s.poll, 100 * time.Millisecond}, "RetryInterval": {s.retry, 500 * time.Millisecond},
		"Lease": {s.limits.lease, 10 * time.Second}, "SaveInterval": {s.save, 100 * time.Millisecond},
		"NackDelay": {s.nackDelay, 100 * time.Millisecond}, "MaxNackDelay": {s.nackMost, 10 * time.Second},
		"CloseTimeout": {s.closeTimeout, 5 * time.Second}, "LockConn": {s.lockConn, ""}, "LockBaseID": {s.lockBase, int64(0)},
		"AllowPooler": {s.pooled, false}, "MaxLocks": {s.maxLocks, 4096},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v, want %v", name, pair[0], pair[1])
		}
	}
	if s.onlyShards != nil {
		t.Errorf("OnlyShards is %v", s.onlyShards)
	}
	if all := s.shardsOf(consumer{shards: 3}); !slices.Equal(all, []int{0, 1, 2}) {
		t.Errorf("shards %v are claimed, want all", all)
	}
}

func TestSettingsTakeWhatIsConfigured(t *testing.T) {
	only := []int{3, 0}
	cfg := SubscriberConfig{
		Schema: "s", Table: "t", ConsumerGroup: "g", Shards: 4, OnlyShards: only, StartFrom: Latest, MaxInFlight: 7, Window: 8,
		PollInterval: 1, RetryInterval: 2, Lease: time.Second, SaveInterval: 3, NackDelay: -1, MaxNackDelay: 4, CloseTimeout: 5,
		LockConn: "host=h", LockBaseID: -9, AllowPooler: true, MaxLocks: 10,
	}
	s, err := newSettings(new(pgxpool.Pool), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for name, pair := range map[string][2]any{
		"Schema": {s.names.schema, "s"}, "Table": {s.names.table, "t"}, "ConsumerGroup": {s.group, "g"}, "Shards": {s.shards, 4},
		"StartFrom": {s.from, Latest}, "MaxInFlight": {s.maxInFlight, 7}, "Window": {s.window, 8}, "PollInterval": {s.poll, time.Duration(1)},
		"RetryInterval": {s.retry, time.Duration(2)}, "Lease": {s.limits.lease, time.Second}, "SaveInterval": {s.save, time.Duration(3)},
		"negative NackDelay": {s.nackDelay, time.Millisecond}, "MaxNackDelay": {s.nackMost, time.Duration(4)},
		"CloseTimeout": {s.closeTimeout, time.Duration(5)}, "LockConn": {s.lockConn, "host=h"}, "LockBaseID": {s.lockBase, int64(-9)},
		"AllowPooler": {s.pooled, true}, "MaxLocks": {s.maxLocks, 10},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s is %v, want %v", name, pair[0], pair[1])
		}
	}
	only[0] = 1 // the caller's slice is the caller's
	if got := s.shardsOf(consumer{shards: 4}); !slices.Equal(got, []int{3, 0}) {
		t.Errorf("shards %v are claimed", got)
	}
	cfg.Ordering, cfg.StartFrom, cfg.LiveOnly = OrderByShard, Earliest, true
	if s, err = newSettings(new(pgxpool.Pool), cfg); err != nil || s.maxInFlight != 1 || !s.liveOnly {
		t.Errorf("OrderByShard has %d messages of a shard out (%v)", s.maxInFlight, err)
	}
}

func TestSettingsRefuse(t *testing.T) {
	pool := new(pgxpool.Pool)
	tests := []struct {
		name   string
		change func(*SubscriberConfig)
		want   string // "": accepted
	}{
		{"nothing", func(*SubscriberConfig) {}, ""},
		{"no group", func(c *SubscriberConfig) { c.ConsumerGroup = "" }, "ConsumerGroup is empty"},
		{"a group that is no text", func(c *SubscriberConfig) { c.ConsumerGroup = "\xff" }, "ConsumerGroup is not valid UTF-8"},
		{"a group with a NUL", func(c *SubscriberConfig) { c.ConsumerGroup = "a\x00" }, "ConsumerGroup contains a NUL"},
		{"a long group", func(c *SubscriberConfig) { c.ConsumerGroup = strings.Repeat("g", 1000) }, ""},
		{"a bad schema", func(c *SubscriberConfig) { c.Schema = "pg_x" }, "Schema"},
		{"a bad table", func(c *SubscriberConfig) { c.Table = strings.Repeat("t", 63) }, "Table"},
		{"256 shards", func(c *SubscriberConfig) { c.Shards = 256 }, ""},
		{"257 shards", func(c *SubscriberConfig) { c.Shards = 257 }, "Shards is 257"},
		{"-1 shards", func(c *SubscriberConfig) { c.Shards = -1 }, "Shards is -1"},
		{"no shard", func(c *SubscriberConfig) { c.OnlyShards = []int{} }, "OnlyShards is empty"},
		{"the last shard", func(c *SubscriberConfig) { c.OnlyShards = []int{255} }, ""},
		{"a shard beyond the last", func(c *SubscriberConfig) { c.OnlyShards = []int{256} }, "shard 256"},
		{"a negative shard", func(c *SubscriberConfig) { c.OnlyShards = []int{-1} }, "shard -1"},
		{"a shard beyond Shards", func(c *SubscriberConfig) { c.Shards, c.OnlyShards = 4, []int{3, 4} }, "shard 4"},
		{"a shard twice", func(c *SubscriberConfig) { c.OnlyShards = []int{3, 2, 3} }, "shard 3 twice"},
		{"another ordering", func(c *SubscriberConfig) { c.Ordering = 2 }, "Ordering is 2"},
		{"LiveOnly from Latest", func(c *SubscriberConfig) { c.LiveOnly, c.StartFrom = true, Latest }, "LiveOnly"},
		{"LiveOnly from a time", func(c *SubscriberConfig) { c.LiveOnly, c.StartFrom = true, StartAt(time.Now()) }, "LiveOnly"},
		{"no DSN", func(c *SubscriberConfig) { c.LockConn = "postgres://u:hunter2@h:port/d" }, "LockConn"},
		{"a short lease", func(c *SubscriberConfig) { c.Lease = 999 * time.Millisecond }, "Lease is 999ms"},
		{"the shortest lease", func(c *SubscriberConfig) { c.Lease = time.Second }, ""},
		{"the longest lease", func(c *SubscriberConfig) { c.Lease = 24 * time.Hour }, ""},
		{"a long lease", func(c *SubscriberConfig) { c.Lease = 25 * time.Hour }, "Lease is 25h"},
		{"a negative lease", func(c *SubscriberConfig) { c.Lease = -1 }, "Lease is negative"},
		{"negative MaxInFlight", func(c *SubscriberConfig) { c.MaxInFlight = -1 }, "MaxInFlight is negative"},
		{"negative Window", func(c *SubscriberConfig) { c.Window = -1 }, "Window is negative"},
		{"negative MaxLocks", func(c *SubscriberConfig) { c.MaxLocks = -1 }, "MaxLocks is negative"},
		{"negative PollInterval", func(c *SubscriberConfig) { c.PollInterval = -1 }, "PollInterval is negative"},
		{"negative RetryInterval", func(c *SubscriberConfig) { c.RetryInterval = -1 }, "RetryInterval is negative"},
		{"negative SaveInterval", func(c *SubscriberConfig) { c.SaveInterval = -1 }, "SaveInterval is negative"},
		{"negative MaxNackDelay", func(c *SubscriberConfig) { c.MaxNackDelay = -1 }, "MaxNackDelay is negative"},
		{"negative CloseTimeout", func(c *SubscriberConfig) { c.CloseTimeout = -1 }, "CloseTimeout is negative"},
		{"negative NackDelay", func(c *SubscriberConfig) { c.NackDelay = -1 }, ""},
	}
	all := SubscriberConfig{}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := SubscriberConfig{ConsumerGroup: "g"}
			tt.change(&cfg)
			_, err := newSettings(pool, cfg)
			switch {
			case tt.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
				t.Errorf("error %v does not say %q", err, tt.want)
			case err != nil && strings.Contains(err.Error(), "hunter2"):
				t.Errorf("error %v tells the password", err)
			}
		})
		if tt.want != "" {
			tt.change(&all)
		}
	}
	all.Shards = 257
	_, err := NewSubscriber(nil, all, nil)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, field := range []string{
		"pool is nil", "ConsumerGroup", "Schema", "Table", "Shards is", "OnlyShards names shard 3 twice", "Ordering", "LiveOnly", "LockConn", "Lease",
		"MaxInFlight", "Window", "MaxLocks", "PollInterval", "RetryInterval", "SaveInterval", "MaxNackDelay", "CloseTimeout",
	} {
		if !strings.Contains(err.Error(), field) {
			t.Errorf("the error does not name %s:\n%v", field, err)
		}
	}
	if strings.Contains(err.Error(), "hunter2") || strings.Count(err.Error(), "pgoutbox:") != 1 {
		t.Errorf("the error tells the password, or does not name the package once:\n%v", err)
	}
}

func TestConfiguredShardMustExist(t *testing.T) {
	s := settings{onlyShards: []int{0, 15}}
	if err := s.checkShards(consumer{shards: 16}); err != nil {
		t.Errorf("refused: %v", err)
	}
	err := s.checkShards(consumer{shards: 15})
	if err == nil || !isPermanent(err) || !strings.Contains(err.Error(), "shard 15") {
		t.Errorf("error %v", err)
	}
}

func TestCutBytesKeepsCharactersWhole(t *testing.T) {
	tests := []struct {
		text string
		most int
		want string
	}{
		{"abc", 3, "abc"}, {"abc", 2, "ab"}, {"abc", 0, ""}, {"", 3, ""}, {"aé", 2, "a"}, {"aé", 3, "aé"}, {"日本", 5, "日"}, {"日本", 2, ""},
	}
	for _, tt := range tests {
		if got := cutBytes(tt.text, tt.most); got != tt.want {
			t.Errorf("%q to %d bytes: %q, want %q", tt.text, tt.most, got, tt.want)
		}
	}
}

func TestStartPositionsDiffer(t *testing.T) {
	if Earliest == Latest || StartAt(time.Now()) == Earliest || StartAt(time.Now()) == Latest || (StartPosition{}) != Earliest {
		t.Error("two positions are one")
	}
}
