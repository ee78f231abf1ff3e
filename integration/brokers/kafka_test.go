package brokers

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/IBM/sarama"
	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-kafka/v3/pkg/kafka"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
	"github.com/pgoutbox/watermill-pgoutbox/integration/outboxtest"
)

const partitions = 12

// newKafka starts a cluster with topics, and returns where it is.
func newKafka(t *testing.T, topics ...string) []string {
	t.Helper()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(partitions, topics...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(cluster.Close)
	return cluster.ListenAddrs()
}

// kafkaPublisher has the settings that an outbox needs: a record is acknowledged when every in-sync replica has it, and a retry
// neither doubles nor overtakes one.
func kafkaPublisher(t *testing.T, brokers []string, marshaler kafka.Marshaler) message.Publisher {
	t.Helper()
	cfg := kafka.DefaultSaramaSyncPublisherConfig()
	cfg.Version = sarama.V2_8_0_0
	cfg.Producer.RequiredAcks = sarama.WaitForAll
	cfg.Producer.Idempotent = true
	cfg.Net.MaxOpenRequests = 1
	pub, err := kafka.NewPublisher(kafka.PublisherConfig{Brokers: brokers, Marshaler: marshaler, OverwriteSaramaConfig: cfg}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := pub.Close(); err != nil {
			t.Error(err)
		}
	})
	return pub
}

// byOrderingKey makes the ordering key the record's key. A row without one gets none: with an empty one all of them would go to one
// partition.
type byOrderingKey struct{ kafka.DefaultMarshaler }

func (m byOrderingKey) Marshal(topic string, msg *message.Message) (*sarama.ProducerMessage, error) {
	record, err := m.DefaultMarshaler.Marshal(topic, msg)
	if key, ok := msg.Metadata[pgoutbox.OrderingKey]; ok && err == nil {
		record.Key = sarama.StringEncoder(key)
	}
	return record, err
}

// consume reads n records of the topics from the beginning.
func consume(t *testing.T, brokers []string, n int, topics ...string) []*kgo.Record {
	t.Helper()
	client, err := kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumeTopics(topics...), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(t.Context(), outboxtest.Patience)
	defer cancel()
	var records []*kgo.Record
	for len(records) < n {
		fetched := client.PollFetches(ctx)
		if ctx.Err() != nil {
			t.Fatalf("%d of %d records arrived", len(records), n)
		}
		for _, e := range fetched.Errors() {
			t.Fatalf("partition %d of %s: %v", e.Partition, e.Topic, e.Err)
		}
		records = append(records, fetched.Records()...)
	}
	return records
}

func header(r *kgo.Record, key string) (string, bool) {
	for _, h := range r.Headers {
		if h.Key == key {
			return string(h.Value), true
		}
	}
	return "", false
}

// forward starts what takes rows to a broker, in both of the ways there are.
var forward = map[string]func(*testing.T, *outboxtest.Outbox, message.Publisher){
	"router": func(t *testing.T, db *outboxtest.Outbox, pub message.Publisher) {
		t.Helper()
		sub, err := pgoutbox.NewSubscriber(db.Pool, pgoutbox.SubscriberConfig{ConsumerGroup: "relay"}, outboxtest.NewLog(t))
		if err != nil {
			t.Fatal(err)
		}
		router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
		if err != nil {
			t.Fatal(err)
		}
		router.AddHandler("relay", pgoutbox.AllTopics, sub, "", pgoutbox.RouteByTopic(pub), message.PassthroughHandler)
		outboxtest.Run(t, router.Run)
		t.Cleanup(func() {
			if err := sub.Close(); err != nil {
				t.Error(err)
			}
		})
	},
	"bridge": func(t *testing.T, db *outboxtest.Outbox, pub message.Publisher) {
		t.Helper()
		bridge, err := pgoutbox.NewPublisherBridge(db.Pool, pub, pgoutbox.BridgeConfig{ConsumerGroup: "relay"}, outboxtest.NewLog(t))
		if err != nil {
			t.Fatal(err)
		}
		outboxtest.Run(t, bridge.Run)
	},
}

const (
	keys   = 40
	perKey = 15
	noKey  = 100
)

// published writes rows of many keys, some without one, over two topics by key.
func published(t *testing.T, db *outboxtest.Outbox) map[string]*message.Message {
	t.Helper()
	out := map[string]*message.Message{}
	put := func(topic, key string, n int) {
		for i := range n {
			msg := message.NewMessage(watermill.NewUUID(), fmt.Appendf(nil, "\x00%s %d", key, i))
			msg.Metadata.Set("trace", fmt.Sprintf("ünïcode %d", i))
			if key != "" {
				msg.Metadata.Set(pgoutbox.OrderingKey, key)
			}
			out[msg.UUID] = msg
			db.Must(db.Pub.Publish(topic, msg))
		}
	}
	for k := range keys {
		put([]string{"orders", "invoices"}[k%2], fmt.Sprintf("customer %d", k), perKey)
	}
	put("orders", "", noKey)
	return out
}

// The ordering key is the record's key, whichever way a row takes: so a key has one partition, and its order there.
func TestFC26_OrderingKeyIsTheRecordKey(t *testing.T) {
	for path, start := range forward {
		t.Run(path, func(t *testing.T) {
			db := outboxtest.New(t)
			brokers := newKafka(t, "orders", "invoices")
			sent := published(t, db)
			start(t, db, kafkaPublisher(t, brokers, byOrderingKey{}))
			records := consume(t, brokers, len(sent), "orders", "invoices")

			of, last, spread := map[string]int32{}, map[string]int{}, map[int32]bool{}
			for _, r := range records {
				uuid, _ := header(r, kafka.UUIDHeaderKey)
				msg := sent[uuid]
				if msg == nil {
					t.Fatalf("a record of UUID %q arrived", uuid)
				}
				delete(sent, uuid)
				key, keyed := msg.Metadata[pgoutbox.OrderingKey]
				if string(r.Key) != key || (r.Key != nil) != keyed {
					t.Fatalf("the record's key is %q, the ordering key %q", r.Key, key)
				}
				if !slices.Equal(r.Value, msg.Payload) {
					t.Errorf("payload %q arrived as %q", msg.Payload, r.Value)
				}
				for name, value := range msg.Metadata {
					if got, _ := header(r, name); got != value {
						t.Errorf("metadata %s is %q, want %q", name, got, value)
					}
				}
				if !keyed {
					spread[r.Partition] = true
					continue
				}
				if before, ok := of[key]; ok && before != r.Partition {
					t.Errorf("key %q is in partitions %d and %d", key, before, r.Partition)
				}
				of[key] = r.Partition
				var n int
				if _, err := fmt.Sscanf(string(r.Value[len(key)+2:]), "%d", &n); err != nil || n != last[key] {
					t.Errorf("of key %q row %d came, want %d (%v)", key, n, last[key], err)
				}
				last[key]++
			}
			if len(sent) > 0 {
				t.Errorf("%d rows did not arrive", len(sent))
			}
			if len(spread) < 2 {
				t.Errorf("%d rows without a key went to %d partition", noKey, len(spread))
			}
		})
	}
}

// The marshaler that a Publisher has by default knows no key, and tears keys apart. The documentation warns of it.
func TestFC26_DefaultMarshalerLosesTheKey(t *testing.T) {
	db := outboxtest.New(t)
	brokers := newKafka(t, "orders", "invoices")
	sent := published(t, db)
	forward["bridge"](t, db, kafkaPublisher(t, brokers, kafka.DefaultMarshaler{}))
	of := map[string]map[int32]bool{}
	for _, r := range consume(t, brokers, len(sent), "orders", "invoices") {
		if r.Key != nil {
			t.Fatalf("a record has the key %q", r.Key)
		}
		if key, ok := header(r, pgoutbox.OrderingKey); ok {
			if of[key] == nil {
				of[key] = map[int32]bool{}
			}
			of[key][r.Partition] = true
		}
	}
	torn := 0
	for _, where := range of {
		if len(where) > 1 {
			torn++
		}
	}
	if torn == 0 {
		t.Error("no key is torn apart: the warning is wrong")
	}
}
