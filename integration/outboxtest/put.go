package outboxtest

import (
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// Topic is where the helpers publish to.
const Topic = "orders"

// Message has a payload that names it. The key is "" for none.
func Message(key, uuid string) *message.Message {
	msg := message.NewMessage(uuid, []byte("payload of "+uuid))
	if key != "" {
		msg.Metadata.Set(pgoutbox.OrderingKey, key)
	}
	return msg
}

// Publish publishes a message for each UUID, one after the other. The key is "" for none.
func (o *Outbox) Publish(key string, uuids ...string) {
	o.Helper()
	for _, uuid := range uuids {
		msg := Message(key, uuid)
		msg.SetContext(o.Context())
		o.Must(o.Pub.Publish(Topic, msg))
	}
}

// Put inserts rows "key k/1" to "key k/n" for each of the keys, the keys side by side, and returns their UUIDs in this order.
func (o *Outbox) Put(keys, n int) (uuids []string) {
	o.Helper()
	for i := range n {
		for k := range keys {
			uuids = append(uuids, fmt.Sprintf("key %d/%d", k+1, i+1))
		}
	}
	o.Exec(`
		INSERT INTO outbox (topic, key, uuid)
		SELECT $1, split_part(uuid, '/', 1), uuid
		FROM unnest($2::text[]) WITH ORDINALITY AS u (uuid, n)
		ORDER BY n`, Topic, uuids)
	return uuids
}

// ID is the row of a message.
func (o *Outbox) ID(uuid string) int64 {
	o.Helper()
	return Ask[int64](o, "SELECT id FROM outbox WHERE uuid = $1", uuid)
}

// KeyIn returns the n-th key that falls into a shard.
func (o *Outbox) KeyIn(shard, shards, n int) string {
	o.Helper()
	return Ask[string](o, `SELECT key FROM (SELECT 'key-' || i AS key FROM generate_series(1, 10000) AS i) AS keys
		WHERE (hashtextextended(key COLLATE "C", 0) & 255) % $1 = $2 ORDER BY length(key), key OFFSET $3 LIMIT 1`, shards, shard, n)
}
