package torture

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
)

// Child is the other end of a Process: TestMain calls it first. In a child it runs the reader that the parent asked for
// and returns the exit code and true; anywhere else it returns false at once.
func Child(readers map[string]Reader) (code int, isChild bool) {
	role, isChild := os.LookupEnv(roleVariable)
	if !isChild {
		return 0, false
	}
	reader, ok := readers[role]
	if !ok {
		fmt.Fprintf(os.Stderr, "no reader has the role %q\n", role)
		return 2, true
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer stop()
	ctx, orphaned := context.WithCancel(ctx)
	defer orphaned()

	w := &wire{out: json.NewEncoder(os.Stdout), waiting: make(map[int64]chan bool)}
	go func() { // ends with the process: a read from standard input cannot be called off
		w.listen(os.Stdin)
		orphaned() // the parent is gone
	}()
	if err := reader.Run(ctx, os.Getenv(dsnVariable), w.deliver); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1, true
	}
	return 0, true
}

// wire carries deliveries to the parent and acks back. It is safe for concurrent use.
type wire struct {
	mu      sync.Mutex
	out     *json.Encoder
	sent    int64
	waiting map[int64]chan bool
}

func (w *wire) deliver(d Delivery) Ack {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sent++
	n, answer := w.sent, make(chan bool, 1)
	w.waiting[n] = answer
	err := w.out.Encode(report{n, d})
	return func(ctx context.Context) error {
		if err != nil {
			return err
		}
		select {
		case ok := <-answer:
			if !ok {
				return ErrRefused
			}
			return nil
		case <-ctx.Done():
			w.forget(n)
			return context.Cause(ctx)
		}
	}
}

func (w *wire) forget(n int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.waiting, n)
}

// listen hands the parent's replies to those who wait for them, until the parent is gone.
func (w *wire) listen(in io.Reader) {
	for replies := json.NewDecoder(in); ; {
		var r reply
		if err := replies.Decode(&r); err != nil {
			if !errors.Is(err, io.EOF) {
				fmt.Fprintln(os.Stderr, "read the parent:", err)
			}
			return
		}
		w.mu.Lock()
		if answer, ok := w.waiting[r.N]; ok {
			answer <- r.OK
			delete(w.waiting, r.N)
		}
		w.mu.Unlock()
	}
}
