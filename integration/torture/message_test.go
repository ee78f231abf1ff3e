package torture

import "testing"

func TestDeliveryMustBeWhatWasWritten(t *testing.T) {
	m := Message{ID: 7, Key: "key01", Version: 3}
	good := Delivery{Row: 70, Topic: m.topic(), Key: m.Key, Payload: m.payload()}
	if got, err := read(good); err != nil || got != m {
		t.Fatalf("read %+v, %v; want %+v", got, err, m)
	}
	tests := []struct {
		name  string
		spoil func(*Delivery)
	}{
		{"another key", func(d *Delivery) { d.Key = "key02" }},
		{"no key", func(d *Delivery) { d.Key = "" }},
		{"another topic", func(d *Delivery) { d.Topic = "torture" }},
		{"half a payload", func(d *Delivery) { d.Payload = d.Payload[:5] }},
		{"no payload", func(d *Delivery) { d.Payload = nil }},
		{"somebody else's payload", func(d *Delivery) { d.Payload = []byte("{}") }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			d := good
			tt.spoil(&d)
			if _, err := read(d); err == nil {
				t.Error("read it without an error")
			}
		})
	}
}
