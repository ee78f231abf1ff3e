package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill-redisstream/pkg/redisstream"
	"github.com/redis/go-redis/v9"
)

// streams are the Redis streams that the relay forwards to, one for each topic. The prefix keeps them apart from whatever
// else a server that was found holds.
type streams struct {
	options *redis.Options
	client  *redis.Client
	prefix  string
}

func openStreams(ctx context.Context, url string) (*streams, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, errors.New("the address of Redis is not a URL") // its error would quote the password
	}
	options.PoolSize = 64 // calls of Publish that may be under way at once
	s := &streams{options: options, client: redis.NewClient(options), prefix: "pgoutbox-demo:" + strings.ToLower(rand.Text()) + ":"}
	if err := s.client.Ping(ctx).Err(); err != nil {
		return nil, errors.Join(fmt.Errorf("reach Redis: %w", err), s.client.Close())
	}
	return s, nil
}

// publisher has a client of its own, because its Close closes it.
func (s *streams) publisher(logger watermill.LoggerAdapter) (*redisstream.Publisher, error) {
	return redisstream.NewPublisher(redisstream.PublisherConfig{Client: redis.NewClient(s.options)}, logger)
}

// delivery is what was found in a stream.
type delivery struct {
	topic string
	at    streamID
	uuid  string
	order order
}

// streamID is Redis's identifier of an entry: the time in milliseconds and a number within it. Within a stream it ascends.
type streamID struct{ ms, n int64 }

func (a streamID) before(b streamID) bool { return a.ms < b.ms || (a.ms == b.ms && a.n < b.n) }

// read returns everything that was forwarded, stream by stream, in the order of each.
func (s *streams) read(ctx context.Context) ([]delivery, error) {
	const page = 5000
	var all []delivery
	for _, topic := range topics {
		for from := "-"; ; {
			entries, err := s.client.XRangeN(ctx, s.prefix+topic, from, "+", page).Result()
			if err != nil {
				return nil, fmt.Errorf("read stream %s: %w", topic, err)
			}
			for _, entry := range entries {
				d, err := parseDelivery(topic, entry)
				if err != nil {
					return nil, fmt.Errorf("entry %s of stream %s: %w", entry.ID, topic, err)
				}
				all = append(all, d)
			}
			if len(entries) < page {
				break
			}
			from = "(" + entries[page-1].ID
		}
	}
	return all, nil
}

func parseDelivery(topic string, entry redis.XMessage) (delivery, error) {
	msg, err := redisstream.DefaultMarshallerUnmarshaller{}.Unmarshal(entry.Values)
	if err != nil {
		return delivery{}, err
	}
	d := delivery{topic: topic, uuid: msg.UUID}
	if err := json.Unmarshal(msg.Payload, &d.order); err != nil {
		return delivery{}, err
	}
	ms, n, _ := strings.Cut(entry.ID, "-")
	if d.at.ms, err = strconv.ParseInt(ms, 10, 64); err != nil {
		return delivery{}, err
	}
	d.at.n, err = strconv.ParseInt(n, 10, 64)
	return d, err
}

// close removes the streams.
func (s *streams) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	var problems []error
	for _, topic := range topics {
		problems = append(problems, s.client.Del(ctx, s.prefix+topic).Err())
	}
	return errors.Join(append(problems, s.client.Close())...)
}
