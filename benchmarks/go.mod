module github.com/pgoutbox/watermill-pgoutbox/benchmarks

go 1.26.0

replace (
	github.com/pgoutbox/watermill-pgoutbox => ../
	github.com/pgoutbox/watermill-pgoutbox/integration => ../integration
)
