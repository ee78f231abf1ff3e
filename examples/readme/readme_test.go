package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/pgserver"
)

const runProgram = "README_TEST_RUN_PROGRAM"

// TestMain is the program itself when a test starts this executable a second time.
func TestMain(m *testing.M) {
	if os.Getenv(runProgram) != "" {
		main()
		return
	}
	os.Exit(pgserver.Run(m))
}

const patience = 30 * time.Second

// blocks returns the README's code blocks of a language.
func blocks(t *testing.T, language string) []string {
	t.Helper()
	text := read(t, "../../README.md")
	var out []string
	for _, match := range regexp.MustCompile("(?sm)^```(\\w*)\n(.*?)^```$").FindAllStringSubmatch(text, -1) {
		if match[1] == language {
			out = append(out, match[2])
		}
	}
	if len(out) == 0 {
		t.Fatalf("the README has no %s", language)
	}
	return out
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func TestReadmeShowsThisProgram(t *testing.T) {
	if blocks(t, "go")[0] != read(t, "main.go") {
		t.Error("the README's first program is not examples/readme/main.go; copy it")
	}
}

func TestReadmeShowsOnlyCodeThatCompiles(t *testing.T) {
	compiled := read(t, "../../example_test.go") + read(t, "../../integration/brokers/kafka_test.go")
	for _, block := range blocks(t, "go")[1:] {
		found := false
		for indent := ""; indent != "\t\t\t\t"; indent += "\t" {
			found = found || strings.Contains(compiled, regexp.MustCompile(`(?m)^(.)`).ReplaceAllString(block, indent+"$1"))
		}
		if !found {
			t.Errorf("not in example_test.go or integration/brokers, so perhaps it does not compile:\n%s", block)
		}
	}
}

func TestProgramForwardsItsOrder(t *testing.T) {
	t.Setenv("REDIS_URL", "") // its stream has a name that a server in use may have, too
	server, err := pgserver.StartRedis(t.Context(), pgserver.Options{Logf: t.Logf})
	if err != nil {
		t.Fatal(err)
	}
	defer closes(t, server)
	dsn := pgserver.Database(t)

	program := exec.CommandContext(t.Context(), os.Args[0])
	program.Env = append(os.Environ(), runProgram+"=yes", "DATABASE_URL="+dsn, "REDIS_URL="+server.URL())
	var said strings.Builder
	program.Stdout, program.Stderr = &said, &said
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	client := redis.NewClient(&redis.Options{Addr: server.Addr()})
	defer client.Close()
	forwarded, err := client.XRead(t.Context(), &redis.XReadArgs{Streams: []string{"orders", "0"}, Block: patience}).Result()
	if err := errors.Join(program.Process.Signal(os.Interrupt), program.Wait()); err != nil {
		t.Errorf("the program does not end well: %v", err)
	}
	if err != nil {
		t.Fatalf("nothing in the stream: %v\n%s", err, said.String())
	}

	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(forwarded[0].Messages[0].Values)
	if err != nil {
		t.Fatal(err)
	}
	var id string
	pool := pgserver.Pool(t, dsn)
	if err := pool.QueryRow(t.Context(), "SELECT id FROM orders").Scan(&id); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf(`{"order": %q}`, id); string(msg.Payload) != want || msg.Metadata.Get(pgoutbox.OrderingKey) != id {
		t.Errorf("got %s with %v, want %s", msg.Payload, msg.Metadata, want)
	}
}

// TestSQLOfTheReadme gives two new roles what the README grants, and has one publish, as the README's SQL does and through
// a Publisher, what the other forwards.
func TestSQLOfTheReadme(t *testing.T) {
	sql := blocks(t, "sql")
	insert, parked, grants := sql[0], sql[1], sql[2]
	dsn := pgserver.Database(t)
	admin := pgserver.Pool(t, dsn)
	if err := pgoutbox.Migrate(t.Context(), admin, pgoutbox.SchemaConfig{}); err != nil {
		t.Fatal(err)
	}
	execute(t, admin, "REVOKE ALL ON SCHEMA public FROM PUBLIC")
	shop, relay := role(t, admin, dsn, "shop", &grants), role(t, admin, dsn, "relay", &grants)
	execute(t, admin, grants)

	execute(t, shop, insert)
	execute(t, relay, parked)
	pub, err := pgoutbox.NewPublisher(shop, pgoutbox.PublisherConfig{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	msg := message.NewMessageWithContext(t.Context(), watermill.NewUUID(), []byte(`{"order": 42}`))
	msg.Metadata.Set(pgoutbox.OrderingKey, "order-42")
	if err := pub.Publish("orders", msg); err != nil {
		t.Fatal(err)
	}

	if err := pgoutbox.Migrate(t.Context(), relay, pgoutbox.SchemaConfig{}); err != nil {
		t.Errorf("a relay may call Migrate when the schema is there: %v", err)
	}
	sub, err := pgoutbox.NewSubscriber(relay, pgoutbox.SubscriberConfig{ConsumerGroup: "relay"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer closes(t, sub)
	messages, err := sub.Subscribe(t.Context(), pgoutbox.AllTopics)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		select {
		case msg := <-messages:
			if string(msg.Payload) != `{"order": 42}` || msg.Metadata.Get(pgoutbox.OrderingKey) != "order-42" {
				t.Errorf("got %s with %v", msg.Payload, msg.Metadata)
			}
			msg.Ack()
		case <-time.After(patience):
			t.Fatal("not every message came")
		}
	}

	refused(t, shop, "SELECT payload FROM outbox")
	refused(t, shop, "INSERT INTO outbox (topic, xid) VALUES ('orders', '3')")
	refused(t, relay, "INSERT INTO outbox (topic) VALUES ('orders')")
	refused(t, relay, "DELETE FROM outbox")
}

// role creates a role that may do nothing, puts its name into the grants, and returns a pool whose sessions are that role.
func role(t *testing.T, admin *pgxpool.Pool, dsn, name string, grants *string) *pgxpool.Pool {
	t.Helper()
	unique := fmt.Sprintf("pgoutbox_%s_%d", name, os.Getpid())
	*grants = regexp.MustCompile(`\bTO `+name+`\b`).ReplaceAllString(*grants, "TO "+unique)
	execute(t, admin, "CREATE ROLE "+unique)
	t.Cleanup(func() {
		if _, err := admin.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+unique+"; DROP ROLE "+unique); err != nil {
			t.Error(err)
		}
	})
	return pgserver.Pool(t, dsn, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["role"] = unique })
}

func closes(t *testing.T, c io.Closer) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func refused(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	const insufficientPrivilege = "42501"
	var refusal *pgconn.PgError
	if _, err := pool.Exec(t.Context(), sql); !errors.As(err, &refusal) || refusal.Code != insufficientPrivilege {
		t.Errorf("%s: %v, want it refused", sql, err)
	}
}
