module github.com/pgoutbox/watermill-pgoutbox

go 1.25.0

require (
	github.com/ThreeDotsLabs/watermill v1.5.1
	github.com/jackc/pgx/v5 v5.13.0
)
