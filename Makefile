# make demo        llama.cpp fetched, built, gated, measured and reported on this machine
# make test        everything; a skip for any reason but a missing GPU, or Slurm without root, is a failure
# make test-fast   all but whole jobs, sshd, kernels and llama.cpp; minutes
# make lint        ruff, mypy, import-linter, plain words
# make docs        the pages of docs/, strictly; .make/site
# make bench       this program's own speed, as JSON and a table
# make faults      the fault campaign: crashes, cuts, full disks, hostile files; two hours at most

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: demo test test-fast lint docs bench faults clean

demo: .make/installed
	$(BIN)/dgxlab run experiments/cpu/quickstart.yaml --db demo.db
	@echo "next: . $(BIN)/activate && dgxlab report quickstart --db demo.db" >&2

# The tests start Python a thousand times: what it compiled is kept, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

# What computes takes both processors. What waits, for jobs and lines, leaves them to the build of llama.cpp, which is slow
# the first time, and to what only needs it built; what measures on it then has the machine alone. The build gets what is left
# over: its limit is twice that of other tests.
FAST   := not slow and not llama and not network and not gpu
WAITS  := (slow or network or gpu) and not llama and not alone
BUILDS := llama and not alone
test: .make/test .make/packages
	$(BIN)/pytest --no-skips --numprocesses 2 --dist loadfile -m "$(FAST)"
	nice $(BIN)/pytest --no-skips --timeout 3600 -m "$(BUILDS)" > .make/builds.log 2>&1 & builds=$$!; \
	    $(BIN)/pytest --no-skips --numprocesses 4 --dist loadfile -m "$(WAITS)"; waits=$$?; \
	    wait $$builds; built=$$?; cat .make/builds.log; exit $$((waits | built))
	$(BIN)/pytest --no-skips -m alone

test-fast: .make/test
	$(BIN)/pytest --numprocesses 2 -m "$(FAST)"

lint: .make/lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m bench.words

docs: .make/test
	$(BIN)/mkdocs build --strict --quiet

bench: .make/test
	$(BIN)/python -m bench

faults: .make/test .make/packages
	$(BIN)/python -m faults

clean:
	rm -rf $(VENV) .make

# -- what the targets above stand on --

.make/venv:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@mkdir -p .make && touch $@

.make/installed: .make/venv pyproject.toml
	PYTHONWARNINGS=ignore:Editable $(BIN)/python -m pip install --quiet --editable ".[build]"
	@touch $@

.make/test: .make/installed pyproject.toml
	$(BIN)/python -m pip install --quiet --group test
	@touch $@

.make/lint: .make/test pyproject.toml
	$(BIN)/python -m pip install --quiet --group lint
	@touch $@

# what the tests need beside Python: git, a compiler, an sshd to run on the loopback, a python3 for an ordinary user of it,
# a browser for pages; for root, who alone can start it, Slurm
SLURM := slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core
.make/packages:
	@for tool in git g++; do command -v $$tool >/dev/null || { echo "make test needs $$tool: apt-get install git g++" >&2; exit 1; }; done
	@command -v sshd >/dev/null || test -x /usr/sbin/sshd || { \
	    test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends openssh-server openssh-client >/dev/null; } \
	    || { echo "make test needs sshd: sudo apt-get install openssh-server" >&2; exit 1; }
	@test "$$(id -u)" != 0 || test -x /usr/sbin/slurmd -a -x /usr/sbin/slurmdbd -a -x /usr/sbin/mariadbd || { \
	    apt-get update -qq && apt-get install -qq -y --no-install-recommends $(SLURM) >/dev/null; } \
	    || { echo "make test needs Slurm: apt-get install $(SLURM)" >&2; exit 1; }
	@PATH=/usr/local/bin:/usr/bin:/bin; command -v python3 >/dev/null || { \
	    test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends python3 >/dev/null; } \
	    || { echo "make test needs a python3 that every user may run: sudo apt-get install python3" >&2; exit 1; }
	@command -v chromedriver >/dev/null || { \
	    test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium-driver >/dev/null; } \
	    || { echo "make test needs a Chromium: sudo apt-get install chromium-driver" >&2; exit 1; }
	@mkdir -p .make && touch $@
