package main

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestDocumentsNameTestsThatExist: a promise that names a test which was renamed has none.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	exist := map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			for _, match := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllStringSubmatch(read(t, path), -1) {
				exist[match[1]] = true
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	documents, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	named := 0
	for _, document := range append(documents, "../../README.md") {
		for _, match := range regexp.MustCompile("`(Test[A-Z]\\w+)`").FindAllStringSubmatch(read(t, document), -1) {
			named++
			if !exist[match[1]] {
				t.Errorf("%s names %s, which does not exist", filepath.Base(document), match[1])
			}
		}
	}
	if named == 0 {
		t.Error("no document names a test")
	}
}
