package outboxtest

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
)

// Line is one entry of a Log.
type Line struct {
	Level  string // error, info, debug or trace
	Text   string
	Err    error
	Fields watermill.LogFields // of the logger, then of the entry
}

func (l Line) String() string { return fmt.Sprintf("%s %s: %v %v", l.Level, l.Text, l.Err, l.Fields) }

// contains reports whether every one of the texts stands in the line, in any case.
func (l Line) contains(texts []string) bool {
	line := strings.ToLower(l.String())
	return !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, strings.ToLower(text)) })
}

// Log is a Watermill logger that remembers what was reported, at every level. It is safe for concurrent use. When its test
// fails it shows the last lines.
type Log struct {
	fields watermill.LogFields
	lines  *Record[Line] // shared with what With returns
}

var _ watermill.LoggerAdapter = (*Log)(nil)

// NewLog makes the log of a test.
func NewLog(t testing.TB) *Log {
	t.Helper()
	l := &Log{lines: &Record[Line]{}}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the log says, at last\n%s", l.tail(50))
		}
	})
	return l
}

// Lines returns those that contain every one of the texts, in any case; all when there are none.
func (l *Log) Lines(texts ...string) []Line {
	return l.lines.Of(func(line Line) bool { return line.contains(texts) })
}

// Errors returns the lines that report an error.
func (l *Log) Errors() []Line {
	return l.lines.Of(func(line Line) bool { return line.Level == "error" })
}

// Until waits for a line that contains every one of the texts, in any case, and returns the first.
func (l *Log) Until(t testing.TB, texts ...string) (first Line) {
	t.Helper()
	l.lines.Await(t, Patience, func(all []Line) (bool, string) {
		i := slices.IndexFunc(all, func(line Line) bool { return line.contains(texts) })
		if i >= 0 {
			first = all[i]
		}
		return i >= 0, fmt.Sprintf("the log has a line with %q; it says, at last\n%s", texts, l.tail(50))
	})
	return first
}

// MustBeQuiet fails the test if an error was reported.
func (l *Log) MustBeQuiet(t testing.TB) {
	t.Helper()
	for _, line := range l.Errors() {
		t.Errorf("the log says: %s", line)
	}
}

// String is a line for each entry.
func (l *Log) String() string { return l.tail(0) }

// tail is the last n lines; 0: all.
func (l *Log) tail(n int) string {
	lines := l.lines.All()
	if n > 0 {
		lines = lines[max(0, len(lines)-n):]
	}
	texts := make([]string, len(lines))
	for i, line := range lines {
		texts[i] = line.String()
	}
	return strings.Join(texts, "\n")
}

func (l *Log) add(level, text string, err error, fields watermill.LogFields) {
	l.lines.Add(Line{Level: level, Text: text, Err: err, Fields: l.join(fields)})
}

func (l *Log) join(fields watermill.LogFields) watermill.LogFields {
	all := watermill.LogFields{}
	maps.Copy(all, l.fields)
	maps.Copy(all, fields)
	return all
}

// Error implements watermill.LoggerAdapter.
func (l *Log) Error(text string, err error, fields watermill.LogFields) {
	l.add("error", text, err, fields)
}

// Info implements watermill.LoggerAdapter.
func (l *Log) Info(text string, fields watermill.LogFields) { l.add("info", text, nil, fields) }

// Debug implements watermill.LoggerAdapter.
func (l *Log) Debug(text string, fields watermill.LogFields) { l.add("debug", text, nil, fields) }

// Trace implements watermill.LoggerAdapter.
func (l *Log) Trace(text string, fields watermill.LogFields) { l.add("trace", text, nil, fields) }

// With returns a logger that writes into the same log.
func (l *Log) With(fields watermill.LogFields) watermill.LoggerAdapter {
	return &Log{fields: l.join(fields), lines: l.lines}
}
