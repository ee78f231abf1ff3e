package pgoutbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// settings is a checked configuration, with defaults filled in.
type settings struct {
	names        names
	group        string
	shards       int
	onlyShards   []int
	from         StartPosition
	liveOnly     bool
	ordering     Ordering
	maxInFlight  int
	window       int
	poll         time.Duration
	retry        time.Duration
	limits       limits
	save         time.Duration
	nackDelay    time.Duration
	nackMost     time.Duration
	closeTimeout time.Duration
	lockConn     string
	lockBase     int64
	pooled       bool
	maxLocks     int
	maxAttempts  int
	parkPolicy   ParkPolicy
	stalledAfter time.Duration
	readPool     *pgxpool.Pool
}

// newSettings checks a configuration and reports all problems in one error.
func newSettings(pool *pgxpool.Pool, cfg SubscriberConfig) (settings, error) {
	n, err := newNames(cfg.Schema, cfg.Table)
	problems := []error{err}
	complain := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }
	if pool == nil {
		complain("the pool is nil")
	}
	if cfg.ConsumerGroup == "" {
		complain("ConsumerGroup is empty")
	}
	if err := checkText("ConsumerGroup", cfg.ConsumerGroup); err != nil {
		problems = append(problems, err)
	}
	if cfg.Shards < 0 || cfg.Shards > 256 {
		complain("Shards is %d, it must be between 1 and 256, or 0 for what is stored", cfg.Shards)
	}
	if cfg.OnlyShards != nil && len(cfg.OnlyShards) == 0 {
		complain("OnlyShards is empty but not nil: no shard would ever be led")
	}
	for i, shard := range cfg.OnlyShards {
		if shard < 0 || shard > 255 || (cfg.Shards > 0 && shard >= cfg.Shards) {
			complain("OnlyShards names shard %d, which does not exist", shard)
		}
		if slices.Contains(cfg.OnlyShards[:i], shard) {
			complain("OnlyShards names shard %d twice", shard)
		}
	}
	if cfg.Ordering != OrderByKey && cfg.Ordering != OrderByShard {
		complain("Ordering is %d, it must be OrderByKey or OrderByShard", cfg.Ordering)
	}
	if cfg.ParkPolicy != ParkRow && cfg.ParkPolicy != ParkKey {
		complain("ParkPolicy is %d, it must be ParkRow or ParkKey", cfg.ParkPolicy)
	}
	if cfg.LiveOnly && cfg.StartFrom != Earliest {
		complain("LiveOnly starts at now every time, so StartFrom has no meaning with it")
	}
	if cfg.LockConn != "" {
		if _, err := pgx.ParseConfig(cfg.LockConn); err != nil {
			complain("LockConn is not a DSN that pgx understands") // its error may quote the password
		}
	}
	for _, field := range []struct {
		name  string
		value int64
	}{
		{"MaxInFlight", int64(cfg.MaxInFlight)},
		{"Window", int64(cfg.Window)},
		{"MaxLocks", int64(cfg.MaxLocks)},
		{"MaxAttempts", int64(cfg.MaxAttempts)},
		{"PollInterval", int64(cfg.PollInterval)},
		{"RetryInterval", int64(cfg.RetryInterval)},
		{"Lease", int64(cfg.Lease)},
		{"SaveInterval", int64(cfg.SaveInterval)},
		{"MaxNackDelay", int64(cfg.MaxNackDelay)},
		{"CloseTimeout", int64(cfg.CloseTimeout)},
		{"StalledAfter", int64(cfg.StalledAfter)},
	} {
		if field.value < 0 {
			complain("%s is negative", field.name)
		}
	}
	if cfg.Lease > 0 && cfg.Lease < time.Second {
		complain("Lease is %s, it must be at least 1s", cfg.Lease)
	}
	if cfg.Lease > maxLease {
		complain("Lease is %s, it must be at most %s", cfg.Lease, maxLease)
	}
	s := settings{
		names: n, group: cfg.ConsumerGroup, shards: cfg.Shards, onlyShards: slices.Clone(cfg.OnlyShards), from: cfg.StartFrom,
		liveOnly: cfg.LiveOnly, ordering: cfg.Ordering, lockConn: cfg.LockConn, lockBase: cfg.LockBaseID, pooled: cfg.AllowPooler,
		maxAttempts: cfg.MaxAttempts, parkPolicy: cfg.ParkPolicy,
		maxInFlight:  orDefault(cfg.MaxInFlight, 64),
		window:       orDefault(cfg.Window, 10_000),
		maxLocks:     orDefault(cfg.MaxLocks, 4096),
		poll:         orDefault(cfg.PollInterval, 100*time.Millisecond),
		retry:        orDefault(cfg.RetryInterval, 500*time.Millisecond),
		limits:       limits{lease: orDefault(cfg.Lease, 10*time.Second)},
		save:         orDefault(cfg.SaveInterval, 100*time.Millisecond),
		nackDelay:    orDefault(cfg.NackDelay, 100*time.Millisecond),
		nackMost:     orDefault(cfg.MaxNackDelay, 10*time.Second),
		stalledAfter: orDefault(cfg.StalledAfter, 30*time.Second),
		readPool:     cfg.ReadPool,
		closeTimeout: orDefault(cfg.CloseTimeout, 5*time.Second),
	}
	if s.nackDelay < 0 {
		s.nackDelay = time.Millisecond
	}
	if s.ordering == OrderByShard {
		s.maxInFlight = 1
	}
	return s, errors.Join(problems...)
}

const maxLease = 24 * time.Hour

func orDefault[T int | time.Duration](value, standard T) T {
	if value == 0 {
		return standard
	}
	return value
}

// findConsumer finds or creates the consumer of a topic on the lock session.
func (s *settings) findConsumer(ctx context.Context, g *leadership, topic string) (consumer, error) {
	found, err := do(ctx, g, true, func(ctx context.Context, session *session) (consumer, error) {
		c, err := g.ensureConsumer(ctx, session, s.group, topic, s.shards, s.from)
		if err == nil {
			err = s.checkShards(c)
		}
		return c, err
	})
	if err == nil {
		err = s.checkReadPool(ctx, g)
	}
	return found, err
}

func (s *settings) checkShards(c consumer) error {
	for _, shard := range s.onlyShards {
		if shard >= c.shards {
			return permanent(fmt.Errorf("OnlyShards names shard %d, the consumer has %d", shard, c.shards))
		}
	}
	return nil
}

// shardsOf lists the shards to claim.
func (s *settings) shardsOf(c consumer) []int {
	if s.onlyShards != nil {
		return s.onlyShards
	}
	all := make([]int, c.shards)
	for i := range all {
		all[i] = i
	}
	return all
}

func (s *settings) leadershipConfig(pool *pgxpool.Pool, report reporter) leadershipConfig {
	host, _ := os.Hostname() // for people; "" says as little
	return leadershipConfig{
		names: s.names, limits: s.limits, poll: s.poll, retry: s.retry, save: s.save, lockBase: s.lockBase, pooled: s.pooled,
		replicas: s.readPool != nil, report: report, owner: fmt.Sprintf("%s/%d/%s", host, os.Getpid(), rand.Text()[:8]),
		dial: func(ctx context.Context) (*pgx.Conn, error) { return dialLockSession(ctx, pool, s.lockConn, s.group) },
	}
}

// dialLockSession opens a connection that is not the pool's, in the way the pool opens its own: the hooks run each time, so
// passwords that rotate work. Hooks of acquire and release do not touch it.
func dialLockSession(ctx context.Context, pool *pgxpool.Pool, dsn, group string) (*pgx.Conn, error) {
	like := pool.Config()
	cfg := like.ConnConfig
	if dsn != "" {
		var err error
		if cfg, err = pgx.ParseConfig(dsn); err != nil {
			return nil, permanent(errors.New("LockConn is not a DSN that pgx understands"))
		}
	}
	if like.BeforeConnect != nil {
		if err := like.BeforeConnect(ctx, cfg); err != nil {
			return nil, fmt.Errorf("BeforeConnect: %w", err)
		}
	}
	cfg.RuntimeParams["application_name"] = cutBytes(applicationPrefix+group, maxIdentifier)
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil || like.AfterConnect == nil || dsn != "" {
		return conn, err
	}
	if err := like.AfterConnect(ctx, conn); err != nil {
		return nil, errors.Join(fmt.Errorf("AfterConnect: %w", err), conn.Close(ctx))
	}
	return conn, nil
}

// cutBytes cuts text to a number of bytes without splitting a character.
func cutBytes(text string, most int) string {
	if len(text) <= most {
		return text
	}
	for most > 0 && !utf8.RuneStart(text[most]) {
		most--
	}
	return text[:most]
}

// logReporter adapts a Watermill logger for the leader, which knows nothing of Watermill.
type logReporter struct{ logger watermill.LoggerAdapter }

func (l logReporter) info(message string, fields map[string]any) {
	l.logger.Info(message, watermill.LogFields(fields))
}

func (l logReporter) failed(message string, err error, fields map[string]any) {
	l.logger.Error(message, err, watermill.LogFields(fields))
}
