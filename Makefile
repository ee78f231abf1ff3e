# The targets are the steps of CI; `make help` lists them.

GO       ?= go
MODULES  := . integration examples benchmarks
PACKAGES := ./... ./integration/... ./examples/... ./benchmarks/...
LINTER   := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.DEFAULT_GOAL := help

.PHONY: help
help: ## Print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: ## Show the main job on real servers: orders in, Redis Streams out, with trouble half-way (ARGS="-bridge")
	$(GO) run ./examples/quickstart $(ARGS)

.PHONY: lint
lint: ## Check formatting, go vet, go.mod files, that the library builds alone, and golangci-lint
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt -w these files:" $$unformatted; exit 1; fi
	$(GO) vet $(PACKAGES)
	@for m in $(MODULES); do echo "tidy $$m"; (cd $$m && $(GO) mod tidy -diff) || exit 1; done
	GOWORK=off $(GO) build ./...
	$(GO) run $(LINTER) run $(PACKAGES)

.PHONY: test
test: ## Run every test of every module with the race detector (PostgreSQL and Redis are found or started)
	$(GO) test -race -count=1 -timeout 15m $(PACKAGES)

VERSIONS ?= 14 15 16 17 18
.PHONY: test-matrix
test-matrix: ## Run the integration suite on PostgreSQL VERSIONS="14 15 16 17 18" (server programs from npm)
	./integration/matrix.sh $(VERSIONS)

D ?= 20s
.PHONY: torture
torture: ## Attack the reader for D=20s at a time and count what it loses, invents or inverts
	$(GO) test -race -count=1 -timeout 60m -v -run '^TestTorture$$' ./integration/torture -torture.d $(D)

.PHONY: torture-faults
torture-faults: ## The same for D=20s with processes killed, the server crashed, tables locked, writes failing and backends stopped
	$(GO) test -race -count=1 -timeout 60m -v -run '^TestTorture$$/^disturbed$$' ./integration/torture -torture.d $(D) -torture.troubled

.PHONY: stress
stress: ## Run Watermill's acceptance suite STRESS_TEST_COUNT times (10) side by side
	$(GO) test -race -count=1 -timeout 30m -tags stress -run '^TestStress$$' ./integration/universal

.PHONY: reconnect
reconnect: ## Restart the server twice under Watermill's TestReconnect (without -race: the test has races of its own)
	PGOUTBOX_TEST_PROVIDER=local $(GO) test -count=1 -timeout 10m -tags reconnect -run '^TestReconnect$$' ./integration/universal

C ?= .
.PHONY: cases
cases: ## Run the fault cases of docs/cases.md (C=FC13 picks some) with their full waits and rounds
	PGOUTBOX_TEST_FULL=1 $(GO) test -race -count=1 -timeout 60m -v -run '$(C)' ./integration/cases ./integration/writeside ./integration/faults

T ?= 20s
.PHONY: fuzz
fuzz: ## Run every fuzz test of the library for T=20s
	@for f in $$($(GO) test -list '^Fuzz' . | grep '^Fuzz'); do $(GO) test -run '^$$' -fuzz "^$$f$$" -fuzztime $(T) . || exit 1; done
