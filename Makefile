# Every target sets up what it needs in a fresh .venv, with the exact versions of constraints.txt.
#   make demo ARGS="--epochs 5"      make test ARGS="-k fingerprint"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# The newest and the oldest Keras that the engine was checked with.
KERAS := keras==3.15.1
OLDEST_KERAS := keras==3.15.0

# As environment variables, and not as options, they also hold for the environment in which pip builds this package;
# older versions of pip read the first there, newer ones the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test compat lint format matrix soak bench clean

help:
	@echo "make demo     train on handwritten digits on two placements and compare the bits"
	@echo "make test     all tests, with short forms of matrix and soak"
	@echo "make compat   some tests with the oldest Keras, with torch, TensorFlow and grain as sources of data, and exports for others"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff write"
	@echo "make matrix   the full cross of layers, precisions, placements, optimizers and sources of data, with a table (an hour)"
	@echo "make soak     the long runs"
	@echo "make bench    all benchmarks, beside TensorFlow and torch, into benchmarks/RESULTS.md (hours)"
	@echo "make clean    remove .venv"

demo: $(VENV)/demo.stamp
	$(BIN)/unisono demo $(ARGS)

test: $(VENV)/dev.stamp
	$(PYTEST) -m "not full" $(ARGS)

# What make test has resumed over already is left out.
compat: $(VENV)-compat/made
	$(VENV)-compat/bin/python -m pytest -n 2 --dist worksteal tests/test_same_bits.py tests/test_programs.py tests/test_training_data.py \
		tests/test_training_bad_data.py tests/test_loop_data.py tests/test_export_tf_integration.py tests/test_peers_integration.py \
		tests/test_backup.py \
		-m "not full" -k "not random_model and not test_backup or ((over_every_source or other_rows or grain) and not arrays and not PyDataset)" $(ARGS)

# No limits of time: it may run on a slow or loaded machine.
matrix: $(VENV)-matrix/made
	UNISONO_MATRIX=full $(VENV)-matrix/bin/python -m pytest -n 2 --dist worksteal -m "matrix or full" --timeout 0 $(ARGS)
	$(VENV)-matrix/bin/python tests/matrix.py

# One at a time: the long runs load the machine by themselves.
soak: $(VENV)-matrix/made
	UNISONO_SOAK=full $(VENV)-matrix/bin/python -m pytest -m soak --timeout 0 $(ARGS)

# Alone on the machine.
bench: $(VENV)-bench/made
	$(VENV)-bench/bin/python benchmarks/run.py --out benchmarks $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-compat $(VENV)-matrix $(VENV)-bench

# A stamp is an extra of pyproject.toml that .venv has.
$(VENV)/%.stamp: pyproject.toml constraints.txt $(VENV)/made
	@echo "Installing unisono[$*] into $(VENV); this takes a minute or two the first time."
	$(BIN)/python -m pip install --quiet $(KERAS) --editable '.[$*]'
	@touch $@

$(VENV)/made:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Unisono needs Python 3.11 or newer; $(PYTHON) is {v}. Write make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)-compat/made: WITH := $(OLDEST_KERAS)
$(VENV)-matrix/made $(VENV)-bench/made: WITH := $(KERAS)

# torch==2.13.0 is a CPU build only where pip is set up for one; elsewhere it brings several GB of CUDA.
$(VENV)-%/made: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet $(WITH) torch tensorflow-cpu grain --editable '.[dev,onnx]'
	@touch $@
