package pgoutbox_test

import (
	"context"
	"database/sql"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	pgoutbox "github.com/pgoutbox/watermill-pgoutbox"
)

// The public surface: what does not compile here has been renamed or has changed its type, and breaks a user.
type (
	ctx    = context.Context
	logger = watermill.LoggerAdapter
	msg    = message.Message
)

var (
	_ string            = pgoutbox.AllTopics
	_ string            = pgoutbox.OrderingKey
	_ pgoutbox.Ordering = pgoutbox.OrderByKey
	_ pgoutbox.Ordering = pgoutbox.OrderByShard

	_ error = pgoutbox.ErrClosed
	_ error = pgoutbox.ErrLeadershipLost
	_ error = pgoutbox.ErrPooledConnection
	_ error = pgoutbox.ErrNoTransaction
	_ error = pgoutbox.ErrPermanent
	_ error = pgoutbox.ErrUnknownOutcome

	_ func(ctx, pgoutbox.Beginner, pgoutbox.SchemaConfig) error = pgoutbox.Migrate
	_ func(pgoutbox.SchemaConfig) (string, error)               = pgoutbox.SchemaSQL
	_ pgoutbox.Beginner                                         = (*pgxpool.Pool)(nil)
	_ pgoutbox.Beginner                                         = (*pgx.Conn)(nil)

	_ func(*pgxpool.Pool, pgoutbox.PublisherConfig, logger) (*pgoutbox.Publisher, error) = pgoutbox.NewPublisher
	_ func(*pgoutbox.Publisher, pgoutbox.Execer) *pgoutbox.Publisher                     = (*pgoutbox.Publisher).WithTx
	_ func(*pgoutbox.Publisher, *sql.Tx) *pgoutbox.Publisher                             = (*pgoutbox.Publisher).WithStdTx
	_ func(ctx, pgoutbox.Execer) ctx                                                     = pgoutbox.ContextWithTx
	_ func(ctx, *sql.Tx) ctx                                                             = pgoutbox.ContextWithStdTx
	_ pgoutbox.Execer                                                                    = pgx.Tx(nil)
	_ pgoutbox.Execer                                                                    = (*pgx.Conn)(nil)
	_ pgoutbox.Execer                                                                    = (*pgxpool.Pool)(nil)
	_ message.Publisher                                                                  = (*pgoutbox.Publisher)(nil)

	_ pgoutbox.StartPosition                                                               = pgoutbox.Earliest
	_ pgoutbox.StartPosition                                                               = pgoutbox.Latest
	_ func(time.Time) pgoutbox.StartPosition                                               = pgoutbox.StartAt
	_ func(*pgxpool.Pool, pgoutbox.SubscriberConfig, logger) (*pgoutbox.Subscriber, error) = pgoutbox.NewSubscriber
	_ message.Subscriber                                                                   = (*pgoutbox.Subscriber)(nil)
	_ message.SubscribeInitializer                                                         = (*pgoutbox.Subscriber)(nil)
	_ func(*pgoutbox.Subscriber, ctx, string) (<-chan *msg, error)                         = (*pgoutbox.Subscriber).Subscribe
	_ func(*pgoutbox.Subscriber, string) error                                             = (*pgoutbox.Subscriber).SubscribeInitialize
	_ func(*pgoutbox.Subscriber) error                                                     = (*pgoutbox.Subscriber).Stop
	_ func(*pgoutbox.Subscriber) error                                                     = (*pgoutbox.Subscriber).Close
	_ func(ctx) (pgoutbox.Row, bool)                                                       = pgoutbox.RowFromContext
	_ func(ctx) string                                                                     = pgoutbox.MessageID

	_ func(*pgxpool.Pool, message.Publisher, pgoutbox.BridgeConfig, logger) (*pgoutbox.PublisherBridge, error) = pgoutbox.NewPublisherBridge
	_ func(*pgoutbox.PublisherBridge, ctx) error                                                               = (*pgoutbox.PublisherBridge).Run
	_ func(message.Publisher) message.Publisher                                                                = pgoutbox.RouteByTopic
	_ func(message.Publisher, func(pgoutbox.Row) (string, error)) message.Publisher                            = pgoutbox.RouteByTopicFunc

	_ func(*pgxpool.Pool, pgoutbox.LeaderConfig, logger) (*pgoutbox.Leader, error) = pgoutbox.NewLeader
	_ func(*pgoutbox.Leader, ctx, func(ctx, pgoutbox.Lead) error) error            = (*pgoutbox.Leader).Run
	_ func(pgoutbox.Lead, ctx, string, ...any) (pgconn.CommandTag, error)          = pgoutbox.Lead.Exec
	_ func(pgoutbox.Lead, ctx, string, ...any) (pgx.Rows, error)                   = pgoutbox.Lead.Query
	_                                                                              = struct{ pgoutbox.Execer }{pgoutbox.Lead{}} // so the Publisher can write on the lock session
)

func TestConstantsKeepTheirValues(t *testing.T) {
	if pgoutbox.AllTopics != "#" || pgoutbox.OrderingKey != "ordering_key" || pgoutbox.OrderByKey != 0 {
		t.Error("rows that are stored and users' literals rest on these values")
	}
	if pgoutbox.Earliest != (pgoutbox.StartPosition{}) {
		t.Error("Earliest is not the zero value of StartPosition")
	}
}

func TestTransactionIsNoBeginner(t *testing.T) {
	if reflect.TypeFor[pgx.Tx]().Implements(reflect.TypeFor[pgoutbox.Beginner]()) {
		t.Error("a pgx.Tx fits Beginner, so Migrate could run inside the user's transaction")
	}
}

// fields are those of the configurations and values that users write and read.
func TestStructsHaveTheirFields(t *testing.T) {
	type fields map[string]reflect.Type
	text, number, duration := reflect.TypeFor[string](), reflect.TypeFor[int](), reflect.TypeFor[time.Duration]()
	lock := fields{
		"Schema": text, "Table": text, "Shards": number, "OnlyShards": reflect.TypeFor[[]int](), "RetryInterval": duration,
		"Lease": duration, "LockConn": text, "LockBaseID": reflect.TypeFor[int64](), "AllowPooler": reflect.TypeFor[bool](),
	}
	read := fields{
		"ConsumerGroup": text, "StartFrom": reflect.TypeFor[pgoutbox.StartPosition](), "LiveOnly": reflect.TypeFor[bool](),
		"Window": number, "PollInterval": duration, "SaveInterval": duration, "NackDelay": duration, "MaxNackDelay": duration,
		"CloseTimeout": duration, "ReadPool": reflect.TypeFor[*pgxpool.Pool](),
	}
	topicFunc := reflect.TypeFor[func(pgoutbox.Row) (string, error)]()
	tests := map[reflect.Type][]fields{
		reflect.TypeFor[pgoutbox.SchemaConfig](): {{"Schema": text, "Table": text}},
		reflect.TypeFor[pgoutbox.PublisherConfig](): {{
			"Schema": text, "Table": text, "Key": reflect.TypeFor[func(string, *message.Message) string](),
		}},
		reflect.TypeFor[pgoutbox.SubscriberConfig](): {lock, read, {"Ordering": reflect.TypeFor[pgoutbox.Ordering](), "MaxInFlight": number}},
		reflect.TypeFor[pgoutbox.BridgeConfig](): {lock, read, {
			"Topic": text, "TopicFunc": topicFunc, "Lanes": number, "BatchSize": number,
		}},
		reflect.TypeFor[pgoutbox.LeaderConfig](): {lock, {"Name": text}},
		reflect.TypeFor[pgoutbox.Lead]():         {{"Shard": number, "Term": reflect.TypeFor[int64]()}},
		reflect.TypeFor[pgoutbox.Row](): {{
			"ID": reflect.TypeFor[int64](), "Shard": number, "Term": reflect.TypeFor[int64](), "Topic": text, "Key": text,
			"CreatedAt": reflect.TypeFor[time.Time](), "Attempt": number,
		}},
	}
	for of, groups := range tests {
		for _, group := range groups {
			for name, want := range group {
				field, ok := of.FieldByName(name)
				if !ok || field.Type != want || len(field.Index) != 1 {
					t.Errorf("%s.%s is %v, want a field of its own of type %v", of, name, field.Type, want)
				}
			}
		}
	}
}

// TestExportedNamesAreDocumented holds every exported name, method and configuration field to a comment, because `go doc` is
// the manual.
func TestExportedNamesAreDocumented(t *testing.T) {
	files := token.NewFileSet()
	sources, err := filepath.Glob("*.go")
	if err != nil || len(sources) == 0 {
		t.Fatalf("%d files, %v", len(sources), err)
	}
	seen, manuals := 0, 0
	for _, source := range sources {
		if strings.HasSuffix(source, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(files, source, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		if file.Doc.Text() != "" {
			manuals++
		}
		for _, decl := range file.Decls {
			for name, comment := range documented(decl) {
				seen++
				if complaint := complaint(name, comment); complaint != "" {
					t.Errorf("%s: %s: %s", files.Position(decl.Pos()), name, complaint)
				}
			}
		}
	}
	if seen < 60 {
		t.Errorf("only %d exported names were found", seen)
	}
	if manuals > 1 {
		t.Errorf("%d files have a package comment, it belongs into one", manuals)
	}
}

// documented returns the exported names of a declaration with their comments. The name of a field is preceded by its type's.
func documented(decl ast.Decl) map[string]string {
	out := map[string]string{}
	switch decl := decl.(type) {
	case *ast.FuncDecl:
		if receiver := receiverName(decl); decl.Name.IsExported() && (receiver == "" || ast.IsExported(receiver)) {
			out[decl.Name.Name] = decl.Doc.Text()
		}
	case *ast.GenDecl:
		for _, spec := range decl.Specs {
			switch spec := spec.(type) {
			case *ast.ValueSpec:
				for _, name := range spec.Names {
					if name.IsExported() {
						out[name.Name] = firstOf(spec.Doc, onlyOne(decl), spec.Comment)
					}
				}
			case *ast.TypeSpec:
				if spec.Name.IsExported() {
					out[spec.Name.Name] = firstOf(spec.Doc, decl.Doc)
					addFields(out, spec)
				}
			}
		}
	}
	return out
}

// addFields adds the fields of configurations.
func addFields(out map[string]string, spec *ast.TypeSpec) {
	of, ok := spec.Type.(*ast.StructType)
	if !ok || !strings.HasSuffix(spec.Name.Name, "Config") {
		return
	}
	for _, field := range of.Fields.List {
		for _, name := range field.Names {
			if name.IsExported() {
				out[spec.Name.Name+"."+name.Name] = firstOf(field.Doc, field.Comment)
			}
		}
	}
}

func receiverName(decl *ast.FuncDecl) string {
	if decl.Recv == nil {
		return ""
	}
	of := decl.Recv.List[0].Type
	if star, ok := of.(*ast.StarExpr); ok {
		of = star.X
	}
	if name, ok := of.(*ast.Ident); ok {
		return name.Name
	}
	return "unknown"
}

// onlyOne is a declaration's comment if it can only mean one name.
func onlyOne(decl *ast.GenDecl) *ast.CommentGroup {
	if len(decl.Specs) == 1 {
		return decl.Doc
	}
	return nil
}

func firstOf(groups ...*ast.CommentGroup) string {
	for _, group := range groups {
		if group != nil {
			return group.Text()
		}
	}
	return ""
}

func complaint(name, comment string) string {
	comment = strings.TrimSpace(comment)
	_, field := strings.CutPrefix(name, strings.SplitN(name, ".", 2)[0]+".")
	switch {
	case comment == "":
		return "has no comment"
	case field:
		return ""
	case !strings.HasPrefix(comment, name+" ") && !strings.HasPrefix(comment, name+", "):
		return "its comment begins with something else"
	case !strings.ContainsAny(comment, ".:"):
		return "its comment is no sentence"
	}
	return ""
}
