package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// servers are the PostgreSQL and the Redis of one run, and a database of its own: a server that was found may hold others.
type servers struct {
	postgres *pgserver.Server
	redis    *pgserver.Redis
	pool     *pgxpool.Pool
	name     string // of the database, "" until it exists
}

const closeTimeout = 30 * time.Second

func startServers(ctx context.Context, out *screen) (*servers, error) {
	say := pgserver.Options{Logf: func(format string, args ...any) {
		out.linef("%s", strings.TrimPrefix(fmt.Sprintf(format, args...), "pgserver: "))
	}}
	postgres, err := pgserver.Start(ctx, say)
	if err != nil {
		return nil, err
	}
	redis, err := pgserver.StartRedis(ctx, say)
	if err != nil {
		return nil, errors.Join(err, postgres.Close())
	}
	return &servers{postgres: postgres, redis: redis}, nil
}

// database creates the database and returns a pool on it.
func (s *servers) database(ctx context.Context, connections int) (*pgxpool.Pool, error) {
	cfg, err := pgxpool.ParseConfig(s.postgres.DSN())
	if err != nil {
		return nil, err
	}
	name := "pgoutbox_demo_" + strings.ToLower(rand.Text())
	if err := s.administer(ctx, "CREATE DATABASE "+name); err != nil {
		return nil, err
	}
	s.name = name
	cfg.ConnConfig.Database = name
	cfg.MaxConns = int32(connections)
	s.pool, err = pgxpool.NewWithConfig(ctx, cfg)
	return s.pool, err
}

func (s *servers) administer(ctx context.Context, sql string) error {
	conn, err := pgx.Connect(ctx, s.postgres.DSN())
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, sql)
	return err
}

// close works after Ctrl-C, too.
func (s *servers) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	var problems []error
	if s.pool != nil {
		s.pool.Close()
	}
	if s.name != "" {
		problems = append(problems, s.administer(ctx, "DROP DATABASE "+s.name+" WITH (FORCE)"))
	}
	return errors.Join(append(problems, s.redis.Close(), s.postgres.Close())...)
}
