package pgserver

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
)

// startDSN takes the server that PGOUTBOX_TEST_DSN names, if it is good enough for the tests.
func startDSN(ctx context.Context, o Options) (*Server, error) {
	dsn := os.Getenv("PGOUTBOX_TEST_DSN")
	if dsn == "" {
		return nil, errors.New("PGOUTBOX_TEST_DSN is not set")
	}
	s := &Server{dsn: dsn, source: "found by PGOUTBOX_TEST_DSN"}
	if err := s.identify(ctx); err != nil {
		return nil, err // pgx leaves the password out
	}
	if err := checkMajor(s.major); err != nil {
		return nil, err
	}
	if err := s.checkSettings(ctx, o.Settings); err != nil {
		return nil, err
	}
	return s, nil
}

func checkMajor(major int) error {
	want, err := wantedMajor()
	switch {
	case err != nil:
		return err
	case want != 0 && major != want:
		return fmt.Errorf("the server is PostgreSQL %d, PGOUTBOX_TEST_VERSION asks for %d", major, want)
	case major < oldest:
		return fmt.Errorf("the server is PostgreSQL %d, %d or newer is needed", major, oldest)
	}
	return nil
}

// checkSettings refuses a server on which tests would fail for reasons of their own.
func (s *Server) checkSettings(ctx context.Context, wanted map[string]string) error {
	conn, err := pgx.Connect(ctx, s.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	var super, prepares bool
	const ask = "SELECT rolsuper, current_setting('max_prepared_transactions')::int > 0 FROM pg_roles WHERE rolname = current_user"
	if err := conn.QueryRow(ctx, ask).Scan(&super, &prepares); err != nil {
		return fmt.Errorf("ask for the role's rights: %w", err)
	}
	if !super {
		return errors.New("the role is not a superuser")
	}
	if !prepares {
		return errors.New("max_prepared_transactions is 0; set it to 20")
	}
	for name, want := range wanted {
		var is string
		if err := conn.QueryRow(ctx, "SELECT current_setting($1)", name).Scan(&is); err != nil {
			return fmt.Errorf("ask for %s: %w", name, err)
		}
		if is != want {
			return fmt.Errorf("%s is %q, %q is needed", name, is, want)
		}
	}
	return nil
}

// inDatabase is dsn with another database, whether dsn is a URL or a list of key=value pairs.
func inDatabase(dsn, name string) (string, error) {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return dsn + " dbname=" + name, nil // the last of two equal keys counts
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return "", errors.New("the connection string is not a URL") // url.Error would quote the password
	}
	u.Path = "/" + name
	query := u.Query()
	query.Del("dbname")
	query.Del("database")
	u.RawQuery = query.Encode()
	return u.String(), nil
}
