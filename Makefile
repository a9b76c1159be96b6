# make demo    train a small GPT on 4 local ranks beside plain torch, and write demo.html
# make test    ruff, mypy and all tests, every cell of the lessons included (14 minutes on 2 cores at most)
# make check   ruff, mypy and the fast half of the tests: of the rooms that need no ranks (2 minutes at most)
# make lab     JupyterLab, in lessons/
# make lessons run the lessons again and save their outputs, after an edit
# make gallery docs/gallery.md and its pictures, after a change of a view
# make bench   measured values beside their targets
# make soak    random faults, stop buttons, kills and inputs of parsers, for 30 minutes at most: docs/reliability.md
# make thorough  other long checks (hours): 120 kills of workers of a server, 3000 random models under random plans, plans with
#              threes of keys, all cases of tests, 20000 mutants of programs, all benchmarks
# make lint    ruff and mypy alone
# make site    the site, in build/site: live views, a place to write schedules, the lessons, all documents (needs npm)
# make test-latest    all tests with the newest versions of everything, in an environment of its own
# make clean   remove what tests, builds and the demo left behind (not .venv)
#
# Each makes .venv first, and again when pyproject.toml or constraints.txt have changed.
# PYTHON=python3.12 make test     another Python (3.10 or newer)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test check lab lessons gallery site test-latest bench soak thorough lint clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m minipar.demo $(DEMO_ARGS)

test: $(READY)
	$(BIN)/python tests/everything.py $(TEST_ARGS)

check: $(READY)
	$(BIN)/python tests/everything.py --fast $(TEST_ARGS)

lab: $(READY)  # (docs/jupyter: without the menus that nbgrader adds for teachers)
	JUPYTER_CONFIG_PATH="$(CURDIR)/docs/jupyter:$$JUPYTER_CONFIG_PATH" $(BIN)/python -m jupyterlab --ServerApp.root_dir="$(CURDIR)/lessons"

lessons: $(READY)
	$(BIN)/python tests/notebooks/refresh.py lessons/*.ipynb lessons/solutions/*.ipynb

site: $(READY)
	$(BIN)/python -m docs.site.build build/site
	@echo "$(BIN)/python -m http.server --directory build/site, and open http://localhost:8000"

# Without constraints.txt, and always asking for newer versions: what a user who installs today gets.
test-latest:
	$(PYTHON) -m venv .venv-latest
	.venv-latest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
	  -e ".[lab,test,search,book,models]"
	.venv-latest/bin/python -c 'import torch; print("torch", torch.__version__)'
	.venv-latest/bin/python -m pytest $(TEST_ARGS)

gallery: $(READY)
	$(BIN)/python -m minipar_widgets.gallery docs

bench: $(READY)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

soak: $(READY)
	timeout 1800 $(BIN)/python -m tests.faults.campaign --count 1000 --seconds 1700 --write docs/reliability.md

thorough: $(READY)
	$(BIN)/python -m tests.comm.kills $(SOAK_ARGS)
	$(BIN)/python -m tests.fuzz.campaign $(FUZZ_ARGS)
	$(BIN)/python -m tests.fuzz.core --threes 300
	$(BIN)/python -m tests.outside
	$(BIN)/python -m pytest --thorough tests
	$(BIN)/python -m tests.fuzz.verify_mutants --count 20000
	$(BIN)/python -m benchmarks --quick

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 10) and "minipar needs Python 3.10 or newer, this is %d.%d: PYTHON=python3.12 make ..." % v[:2])'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[lab,test,search,book,models]"
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null 2>&1 || true  # (pip would take one core for it, half of its time)
	@touch $@

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo.html
	find minipar widgets tests benchmarks lessons -name __pycache__ -prune -exec rm -rf {} +
