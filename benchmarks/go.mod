module github.com/pgoutbox/watermill-pgoutbox/benchmarks

go 1.26.0
