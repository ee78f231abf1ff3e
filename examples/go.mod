module github.com/pgoutbox/watermill-pgoutbox/examples

go 1.26.0
