//go:build unix && race

package faults

// memoryFactor is how much more memory a process takes under the race detector, which shadows all of it: "typically 5-10x"
// (go.dev/doc/articles/race_detector), here less than 3.
const memoryFactor = 3
