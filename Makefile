# Every target sets up what it needs in a fresh .venv, with the exact versions of constraints.txt.
#   make demo ARGS="--epochs 5"      make test ARGS="-k fingerprint"

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# As environment variables, and not as options, they also hold for the environment in which pip builds this package;
# older versions of pip read the first there, newer ones the second.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test lint format matrix soak clean

help:
	@echo "make demo     train on handwritten digits on two placements and compare the bits"
	@echo "make test     all tests, with short forms of matrix and soak"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff write"
	@echo "make matrix   the full cross of layers, optimizers and placements"
	@echo "make soak     the long runs"
	@echo "make clean    remove .venv"

demo: $(VENV)/demo.stamp
	$(BIN)/unisono demo $(ARGS)

test: $(VENV)/dev.stamp
	$(PYTEST) $(ARGS)

matrix: $(VENV)/dev.stamp
	UNISONO_MATRIX=full $(PYTEST) -m matrix $(ARGS)

# One at a time: the long runs load the machine by themselves.
soak: $(VENV)/dev.stamp
	UNISONO_SOAK=full $(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV)

# A stamp is an extra of pyproject.toml that .venv has.
$(VENV)/%.stamp: pyproject.toml constraints.txt $(VENV)/made
	@echo "Installing unisono[$*] into $(VENV); this takes a minute or two the first time."
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

$(VENV)/made:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Unisono needs Python 3.11 or newer; $(PYTHON) is {v}. Write make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
