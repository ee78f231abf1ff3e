package pgoutbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"
)

// destinations is a Publisher that remembers what went where; it fails for the topic "broken".
type destinations struct {
	got    []string // topic, blank, UUID
	closed bool
}

var errBroken = errors.New("broken")

func (d *destinations) Publish(topic string, messages ...*message.Message) error {
	if topic == "broken" {
		return errBroken
	}
	for _, msg := range messages {
		d.got = append(d.got, topic+" "+msg.UUID)
	}
	return nil
}

func (d *destinations) Close() error {
	d.closed = true
	return nil
}

// fromRow is a message as a Subscriber hands it out.
func fromRow(uuid string, row Row) *message.Message {
	msg := message.NewMessage(uuid, []byte("secret"))
	msg.Metadata.Set("m", "secret")
	msg.SetContext(&rowContext{Context: context.Background(), row: row, xid: 5})
	return msg
}

func TestRouteByTopicSendsEachRowToItsTopic(t *testing.T) {
	d := new(destinations)
	pub := RouteByTopic(d)
	derived := fromRow("3", Row{Topic: "orders"})
	type key struct{}
	derived.SetContext(context.WithValue(derived.Context(), key{}, 1))
	err := pub.Publish("ignored", fromRow("1", Row{Topic: "orders"}), fromRow("2", Row{Topic: "payments"}), derived)
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"orders 1", "payments 2", "orders 3"}; !slices.Equal(d.got, want) {
		t.Errorf("went %q, want %q", d.got, want)
	}
	if err := pub.Publish("t"); err != nil || len(d.got) != 3 {
		t.Errorf("no message at all: %v, went %q", err, d.got)
	}
	if err := pub.Close(); err != nil || d.closed {
		t.Errorf("the caller's Publisher was closed (%v)", err)
	}
}

func TestRouteByTopicFuncChoosesTheDestination(t *testing.T) {
	d := new(destinations)
	pub := RouteByTopicFunc(d, func(row Row) (string, error) { return row.Topic + "." + row.Key, nil })
	if err := pub.Publish("", fromRow("1", Row{Topic: "orders", Key: "k"})); err != nil {
		t.Fatal(err)
	}
	if want := []string{"orders.k 1"}; !slices.Equal(d.got, want) {
		t.Errorf("went %q, want %q", d.got, want)
	}
}

func TestRouteStopsAtTheFirstFailure(t *testing.T) {
	refused := errors.New("refused")
	topic := func(row Row) (string, error) {
		if row.Topic == "" {
			return "", refused
		}
		return row.Topic, nil
	}
	tests := []struct {
		name string
		bad  *message.Message
		is   error
		says string
	}{
		{"no row", message.NewMessage("u", []byte("secret")), errNoRow, "message 1"},
		{"the function fails", fromRow("u", Row{ID: 77}), refused, "row 77"},
		{"the destination fails", fromRow("u", Row{ID: 78, Topic: "broken"}), errBroken, "row 78"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := new(destinations)
			err := RouteByTopicFunc(d, topic).Publish("", fromRow("1", Row{Topic: "a"}), tt.bad, fromRow("2", Row{Topic: "a"}))
			if !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.says) || strings.Contains(err.Error(), "secret") {
				t.Errorf("error %v", err)
			}
			if err == nil || strings.Count(err.Error(), "pgoutbox:") != 1 {
				t.Errorf("error %v does not name the package once", err)
			}
			if want := []string{"a 1"}; !slices.Equal(d.got, want) {
				t.Errorf("went %q, want %q", d.got, want)
			}
		})
	}
}
