package cases_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ThreeDotsLabs/watermill"
)

// logbook is a logger that remembers infos and errors. It is safe for concurrent use.
type logbook struct {
	fields watermill.LogFields
	shared *logLines
}

type logLines struct {
	mu    sync.Mutex
	lines []logLine
}

type logLine struct {
	failed bool
	text   string
	err    error
	fields watermill.LogFields
}

func (l logLine) String() string {
	level := "INFO "
	if l.failed {
		level = "ERROR"
	}
	return fmt.Sprintf("%s %s: %v %v", level, l.text, l.err, l.fields)
}

// newLogbook shows its lines when the test has failed.
func newLogbook(t testing.TB) *logbook {
	l := &logbook{shared: &logLines{}}
	t.Cleanup(func() {
		if !t.Failed() {
			return
		}
		lines := l.all()
		for _, line := range lines[:min(len(lines), 50)] {
			t.Log(line)
		}
	})
	return l
}

func (l *logbook) all() []logLine {
	l.shared.mu.Lock()
	defer l.shared.mu.Unlock()
	return slices.Clone(l.shared.lines)
}

// errors returns the lines that report an error.
func (l *logbook) errors() []logLine {
	return slices.DeleteFunc(l.all(), func(line logLine) bool { return !line.failed })
}

// says returns the lines that contain a text, in any case.
func (l *logbook) says(text string) []logLine {
	return slices.DeleteFunc(l.all(), func(line logLine) bool {
		return !strings.Contains(strings.ToLower(line.String()), strings.ToLower(text))
	})
}

func (l *logbook) add(line logLine) {
	line.fields = l.fields.Add(line.fields)
	l.shared.mu.Lock()
	defer l.shared.mu.Unlock()
	l.shared.lines = append(l.shared.lines, line)
}

func (l *logbook) Error(text string, err error, fields watermill.LogFields) {
	l.add(logLine{failed: true, text: text, err: err, fields: fields})
}

func (l *logbook) Info(text string, fields watermill.LogFields) {
	l.add(logLine{text: text, fields: fields})
}

func (*logbook) Debug(string, watermill.LogFields) {}

func (*logbook) Trace(string, watermill.LogFields) {}

func (l *logbook) With(fields watermill.LogFields) watermill.LoggerAdapter {
	all := maps.Clone(l.fields)
	if all == nil {
		all = watermill.LogFields{}
	}
	maps.Copy(all, fields)
	return &logbook{fields: all, shared: l.shared}
}
