// Command benchmarks measures how fast the outbox is drained, side by side with the limits that a client on one connection meets, on
// a PostgreSQL server that it finds or starts. Each line is the median of interleaved runs with its spread.
//
//	go run ./benchmarks [-rows n] [-shards n] [-keys n] [-payload bytes] [-runs n]
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

// load is what is drained.
type load struct {
	rows, shards, keys, payload, runs int
}

// drain reads all rows of the outbox once.
type drain struct {
	name string
	run  func(context.Context, *pgxpool.Pool, load) error
}

func main() { os.Exit(run()) }

func run() int {
	var l load
	flag.IntVar(&l.rows, "rows", 300_000, "rows in the backlog")
	flag.IntVar(&l.shards, "shards", 16, "shards of a consumer")
	flag.IntVar(&l.keys, "keys", 1000, "keys in use")
	flag.IntVar(&l.payload, "payload", 256, "bytes of a payload")
	flag.IntVar(&l.runs, "runs", 5, "runs of each, interleaved")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := bench(ctx, l); err != nil {
		fmt.Fprintln(os.Stderr, "benchmarks:", err)
		return 1
	}
	return 0
}

func bench(ctx context.Context, l load) error {
	server, err := pgserver.Start(ctx, pgserver.Options{Logf: func(format string, args ...any) { fmt.Printf(format+"\n", args...) }})
	if err != nil {
		return err
	}
	defer func() { _ = server.Close() }() // the figures are out; a server that will not stop is reaped
	pool, err := pgxpool.New(ctx, server.DSN())
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := fill(ctx, pool, l); err != nil {
		return fmt.Errorf("fill the outbox: %w", err)
	}
	fmt.Printf("%s, %s, %d cores; %d rows of %d bytes, %d keys, %d shards; median of %d runs (lowest, highest)\n",
		server.Provider(), runtime.Version(), runtime.NumCPU(), l.rows, l.payload, l.keys, l.shards, l.runs)
	return compare(ctx, pool, l, []drain{
		{"limit: pages of 1,000 into messages", limitMessages},
		{"bridge to a publisher that does nothing", bridge},
		{"channel of a subscriber, acked at once", channel},
		{"subscriber, router, handler that does nothing", router},
	})
}

func fill(ctx context.Context, pool *pgxpool.Pool, l load) error {
	if err := pgoutbox.Migrate(ctx, pool, pgoutbox.SchemaConfig{}); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, `
		INSERT INTO outbox (topic, key, metadata, payload)
		SELECT 'orders', 'key ' || i % $2, jsonb_build_object('trace', i::text, 'kind', 'order', 'version', '1'), decode(repeat('ab', $3), 'hex')
		FROM generate_series(1, $1::integer) AS i`, l.rows, l.keys, l.payload)
	if err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "VACUUM ANALYZE outbox")
	return err
}

// compare runs every drain in turn, several times, and prints the rate of each beside the first one's.
func compare(ctx context.Context, pool *pgxpool.Pool, l load, drains []drain) error {
	rates := make([][]float64, len(drains))
	for range l.runs {
		for i, d := range drains {
			if err := forget(ctx, pool); err != nil {
				return err
			}
			began := time.Now()
			if err := d.run(ctx, pool, l); err != nil {
				return fmt.Errorf("%s: %w", d.name, err)
			}
			rates[i] = append(rates[i], float64(l.rows)/time.Since(began).Seconds())
		}
	}
	for i, d := range drains {
		slices.Sort(rates[i])
		median := rates[i][len(rates[i])/2]
		fmt.Printf("%-46s %8.0f rows/s (%.0f, %.0f)  %.2f of the limit\n",
			d.name, median, rates[i][0], rates[i][len(rates[i])-1], median/rates[0][len(rates[0])/2])
	}
	return nil
}

// forget removes the consumers, so that the next run reads everything again.
func forget(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, "DELETE FROM outbox_consumers")
	return err
}
