package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Direction is one of the two that bytes travel in.
type Direction int

// The directions.
const (
	ToServer Direction = iota // from the client
	ToClient                  // from the server
)

// Filter decides about one message. What it returns is sent on. With hold, that is the last thing the other side hears: the
// rest of the message, all that follows and the end of the connection wait until Pass is called. It is called on the
// goroutine of the connection.
type Filter func(Message) (send []byte, hold bool)

// Proxy stands between clients and a server. Until it is told otherwise it changes nothing. It is safe for concurrent use.
type Proxy struct {
	network, address string
	listener         net.Listener
	ctx              context.Context
	end              context.CancelFunc
	running          sync.WaitGroup

	mu    sync.Mutex
	lines [2]line
	links map[net.Conn]struct{} // either end of each
}

// line is what happens in one direction.
type line struct {
	filter Filter
	delay  time.Duration
	passed chan struct{} // closed by Pass
}

// NewProxy listens on a port of its own for clients of the server that dsn leads to. Close ends it.
func NewProxy(dsn string) (*Proxy, error) {
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, errors.New("the connection string is not one that pgx understands") // its error may quote the password
	}
	p := &Proxy{links: map[net.Conn]struct{}{}}
	p.network, p.address = pgconn.NetworkAddress(cfg.Host, cfg.Port)
	for i := range p.lines {
		p.lines[i].passed = make(chan struct{})
	}
	if p.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, fmt.Errorf("listen: %w", err)
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	p.running.Go(p.accept)
	return p, nil
}

// Port is where the proxy listens on 127.0.0.1.
func (p *Proxy) Port() uint16 {
	return uint16(p.listener.Addr().(*net.TCPAddr).Port) //nolint:forcetypeassert // a TCP listener has a TCP address
}

// Set lets a filter see every message of a direction from now on.
func (p *Proxy) Set(d Direction, f Filter) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lines[d].filter = f
}

// Silence holds everything back in a direction.
func (p *Proxy) Silence(d Direction) {
	p.Set(d, func(Message) ([]byte, bool) { return nil, true })
}

// Delay makes every message of a direction take longer.
func (p *Proxy) Delay(d Direction, by time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lines[d].delay = by
}

// Pass takes filter and delay of a direction away and sends on what was held.
func (p *Proxy) Pass(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.lines[d].passed)
	p.lines[d] = line{passed: make(chan struct{})}
}

// Cut ends every connection; new ones may come.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.links {
		_ = c.Close() // it may be closed already
	}
}

// Close ends everything and waits for it.
func (p *Proxy) Close() {
	p.end()
	_ = p.listener.Close()
	p.Cut()
	p.running.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.running.Go(func() { p.connect(client) })
	}
}

// connect serves one client until both directions have ended.
func (p *Proxy) connect(client net.Conn) {
	defer client.Close()
	var d net.Dialer
	server, err := d.DialContext(p.ctx, p.network, p.address)
	if err != nil {
		return
	}
	defer server.Close()
	if !p.keep(client, server) {
		return
	}
	defer p.drop(client, server)
	var both sync.WaitGroup
	both.Go(func() { p.pump(ToServer, client, server) })
	both.Go(func() { p.pump(ToClient, server, client) })
	both.Wait()
}

func (p *Proxy) keep(conns ...net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		p.links[c] = struct{}{}
	}
	return p.ctx.Err() == nil
}

func (p *Proxy) drop(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range conns {
		delete(p.links, c)
	}
}

// pump carries messages until one side has ended, and then ends the other. A side that only cannot be written to is not an
// end: a client that has given up must not be noticed by the server through answers that nobody takes.
func (p *Proxy) pump(d Direction, from, to net.Conn) {
	defer to.Close()
	read := readMessage
	if d == ToServer {
		read = readFirst
	}
	for {
		m, err := read(from)
		if err != nil {
			return
		}
		read = readMessage
		l := p.line(d)
		if l.delay > 0 && !p.wait(l.delay) {
			return
		}
		if l.filter == nil {
			_, _ = to.Write(m) // see above
			continue
		}
		send, hold := l.filter(m)
		_, _ = to.Write(send)
		if !hold {
			continue
		}
		select {
		case <-l.passed:
			_, _ = to.Write(m[min(len(send), len(m)):])
		case <-p.ctx.Done():
			return
		}
	}
}

func (p *Proxy) line(d Direction) line {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lines[d]
}

func (p *Proxy) wait(d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}
