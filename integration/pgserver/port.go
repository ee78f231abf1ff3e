package pgserver

import (
	"errors"
	"math/rand/v2"
	"net"
	"strconv"
)

// freePort returns a loopback port that nobody listens on. It lies below the range from which Linux and macOS give ports to
// outgoing connections: one of these could take the port of a server that a test has just stopped.
func freePort() (int, error) {
	const low, high = 20000, 32000
	for range 100 {
		port := low + rand.IntN(high-low)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		if err := l.Close(); err != nil {
			return 0, err
		}
		return port, nil
	}
	return 0, errors.New("no free loopback port")
}
