package torture_test

import (
	"log/slog"
	"os"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/pgoutbox/watermill-pgoutbox/integration/torture"
)

// children are the readers that run in processes of their own.
func children() map[string]torture.Reader {
	logger := watermill.NewSlogLogger(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})))
	return map[string]torture.Reader{
		"fullset":    torture.FullSet{},
		"subscriber": torture.Subscriber{Group: "subscriber", Logger: logger},
		"bridge":     torture.Bridge{Group: "bridge", Logger: logger},
	}
}

// ours are the library's readers, each in the given number of processes.
func ours(t *testing.T, processes int, mortal bool) []*torture.Entrant {
	entrant := func(role string) *torture.Entrant {
		return &torture.Entrant{
			Name:        role,
			Reader:      process(t, role),
			Processes:   processes,
			SlowAcks:    true,
			Mortal:      mortal,
			LockSession: "pgoutbox " + role,
		}
	}
	subscriber, bridge := entrant("subscriber"), entrant("bridge")
	subscriber.Refusals = mortal
	return []*torture.Entrant{subscriber, bridge}
}
