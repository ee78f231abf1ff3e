//go:build unix && !race

package faults

const memoryFactor = 1
