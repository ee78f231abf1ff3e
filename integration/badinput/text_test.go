package badinput

import (
	"crypto/rand"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

// PostgreSQL takes any text but a NUL byte and what is not UTF-8. Wherever somebody gives one it is refused before anything is sent,
// by the name of its field and without its value.
func TestNoFieldTakesWhatIsNoText(t *testing.T) {
	pool := nowhere(t)
	for kind, bad := range map[string]string{"NUL": hush + "a\x00b", "UTF-8": hush + "a\xff\xfeb"} {
		t.Run(kind, func(t *testing.T) {
			subscriber := func(cfg pgoutbox.SubscriberConfig) error {
				_, err := pgoutbox.NewSubscriber(pool, cfg, nil)
				return err
			}
			bridge := func(cfg pgoutbox.BridgeConfig) error {
				_, err := pgoutbox.NewPublisherBridge(pool, outboxtest.Nobody{T: t}, cfg, nil)
				return err
			}
			leader := func(cfg pgoutbox.LeaderConfig) error {
				_, err := pgoutbox.NewLeader(pool, cfg, nil)
				return err
			}
			publisher := func(cfg pgoutbox.PublisherConfig) error {
				_, err := pgoutbox.NewPublisher(pool, cfg, nil)
				return err
			}
			publish := func(topic string, change func(*message.Message)) error {
				pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{}, nil)
				if err != nil {
					t.Fatal(err)
				}
				msg := secret("uuid")
				change(msg)
				return pub.Publish(topic, secret("a good one"), msg)
			}
			keyed := func() error {
				pub, err := pgoutbox.NewPublisher(pool, pgoutbox.PublisherConfig{
					Key: func(string, *message.Message) string { return bad },
				}, nil)
				if err != nil {
					t.Fatal(err)
				}
				return pub.Publish("t", secret("uuid"))
			}
			sub, err := pgoutbox.NewSubscriber(pool, pgoutbox.SubscriberConfig{ConsumerGroup: "group"}, nil)
			if err != nil {
				t.Fatal(err)
			}
			_, subscribed := sub.Subscribe(t.Context(), bad)
			_, schemaSQL := pgoutbox.SchemaSQL(pgoutbox.SchemaConfig{Table: bad})
			same := func(*message.Message) {}
			tests := []struct {
				field string
				err   error
			}{
				{"ConsumerGroup", subscriber(pgoutbox.SubscriberConfig{ConsumerGroup: bad})},
				{"Schema", subscriber(pgoutbox.SubscriberConfig{ConsumerGroup: "group", Schema: bad})},
				{"Table", subscriber(pgoutbox.SubscriberConfig{ConsumerGroup: "group", Table: bad})},
				{"ConsumerGroup", bridge(pgoutbox.BridgeConfig{ConsumerGroup: bad})},
				{"Schema", bridge(pgoutbox.BridgeConfig{ConsumerGroup: "group", Schema: bad})},
				{"Table", bridge(pgoutbox.BridgeConfig{ConsumerGroup: "group", Table: bad})},
				{"Topic", bridge(pgoutbox.BridgeConfig{ConsumerGroup: "group", Topic: bad})},
				{"Name", leader(pgoutbox.LeaderConfig{Name: bad})},
				{"Schema", leader(pgoutbox.LeaderConfig{Name: "name", Schema: bad})},
				{"Table", leader(pgoutbox.LeaderConfig{Name: "name", Table: bad})},
				{"Schema", publisher(pgoutbox.PublisherConfig{Schema: bad})},
				{"Table", publisher(pgoutbox.PublisherConfig{Table: bad})},
				{"Schema", pgoutbox.Migrate(t.Context(), pool, pgoutbox.SchemaConfig{Schema: bad})},
				{"Table", schemaSQL},
				{"topic", subscribed},
				{"topic", sub.SubscribeInitialize(bad)},
				{"topic", publish(bad, same)},
				{"message 1: uuid", publish("t", func(m *message.Message) { m.UUID = bad })},
				{"message 1: a metadata key", publish("t", func(m *message.Message) { m.Metadata.Set(bad, "value") })},
				{"message 1: a metadata value", publish("t", func(m *message.Message) { m.Metadata.Set("name", bad) })},
				{"message 1: a metadata value", publish("t", func(m *message.Message) { m.Metadata.Set(pgoutbox.OrderingKey, bad) })},
				{"message 0: key", keyed()},
			}
			for _, tt := range tests {
				says(t, tt.field, tt.err, tt.field, kind)
			}
		})
	}
}

// A connection string is bytes: user, password and database may be in the encoding of another database. Only a NUL is nowhere right;
// all else is for the server to judge.
func TestLockConnIsBytes(t *testing.T) {
	db := newOutbox(t, "")
	for _, bad := range []string{
		"postgres://user:" + hush + "password@host/\x00", "host=h user=\x00 password=" + hush + "password", "host=\x00", "\x00",
		hush + "password", "postgres://user:" + hush + "password@host:port/",
	} {
		cfg := db.group("group")
		cfg.LockConn = bad
		_, err := pgoutbox.NewSubscriber(db.Pool, cfg, db.log)
		says(t, "NewSubscriber", err, "LockConn")
		_, err = pgoutbox.NewPublisherBridge(db.Pool, outboxtest.Nobody{T: t}, pgoutbox.BridgeConfig{ConsumerGroup: "group", LockConn: bad}, db.log)
		says(t, "NewPublisherBridge", err, "LockConn")
		_, err = pgoutbox.NewLeader(db.Pool, pgoutbox.LeaderConfig{Name: "group", LockConn: bad}, db.log)
		says(t, "NewLeader", err, "LockConn")
	}
	cfg := db.group("group")
	cfg.LockConn = db.DSN + "&user=nobody\xff&password=" + hush + "password"
	messages := db.subscribe(db.subscriber(db.Pool, cfg))
	db.log.Until(t, "error", "connect the lock session")
	select {
	case msg := <-messages:
		t.Errorf("message %v", msg)
	default:
	}
}

func TestTopicsThatMeanNothingAreRefused(t *testing.T) {
	db := newOutbox(t, "")
	sub := db.subscriber(db.Pool, db.group("group"))
	_, subscribed := sub.Subscribe(t.Context(), "")
	says(t, "Subscribe", subscribed, "topic is empty")
	says(t, "SubscribeInitialize", sub.SubscribeInitialize(""), "topic is empty")
	pub, err := pgoutbox.NewPublisher(db.Pool, pgoutbox.PublisherConfig{}, db.log)
	if err != nil {
		t.Fatal(err)
	}
	says(t, "Publish", pub.Publish("", secret("uuid")), "topic is empty")
	says(t, "Publish", pub.Publish(pgoutbox.AllTopics, secret("uuid")), "every topic")
	if n := db.Text("SELECT count(*) FROM outbox"); n != "0" {
		t.Errorf("%s rows are stored", n)
	}
}

// Names of tables have limits, names of groups and topics have none that anybody would meet. Whoever meets it is told.
func TestLongNames(t *testing.T) {
	const most = 63 // bytes of an identifier
	schema := strings.Repeat("ß", most/2) + "s"
	db := newOutbox(t, schema)
	long := db.group(strings.Repeat("группа ", 100))
	uuids := db.put(db.Pool, "long", 9)
	sub := db.subscriber(db.Pool, long)
	db.receive(db.subscribe(sub), uuids)
	const session = "SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'pgoutbox %' AND datname = current_database()"
	if name := db.Text(session); len(name) > most {
		t.Errorf("the lock session is called %q", name)
	}
	db.log.MustBeQuiet(t)
	var endless strings.Builder
	for endless.Len() < 10_000 {
		endless.WriteString(rand.Text()) // nothing that the server could compress
	}
	for what, err := range db.refusals(db.Pool, db.group(endless.String())) {
		says(t, what, err, "10010 bytes", "choose a shorter name", "54000")
	}
	for field, cfg := range map[string]pgoutbox.SubscriberConfig{
		"Schema": {ConsumerGroup: "group", Schema: schema + "s"},
		"Table":  {ConsumerGroup: "group", Table: strings.Repeat("ß", most/2) + "s"}, // derived names are longer
	} {
		_, err := pgoutbox.NewSubscriber(db.Pool, cfg, nil)
		says(t, field, err, field, "bytes long")
	}
}
