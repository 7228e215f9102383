# Every target sets up what it needs in a fresh .venv, with the exact versions of constraints.txt: the oldest JAX that is supported.
#   make demo ARGS="--epochs 5"      make test ARGS="-k fingerprint"
# Any target runs with the newest JAX instead, on Python 3.12 or newer, by
#   make test VENV=.venv-newest CONSTRAINTS=constraints-newest.txt PYTHON=python3.13

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := python -m pytest -n 2 --dist worksteal

# The newest and the oldest Keras that the engine was checked with.
KERAS := keras==3.15.1
OLDEST_KERAS := keras==3.15.0

# What fails with versions that were not tried.
TRIED := tests/public/test_versions.py::test_the_installed_versions_were_tried

# The sources of the native kernels, which an installation compiles.
KERNELS := $(wildcard native/*)

CONSTRAINTS := constraints.txt

# Others that train Keras models, and what they need of what is not installed yet.
OTHERS := keras-hub bayesflow keras-rs keras-tuner kagglehub kagglesdk regex sentencepiece tokenizers pandas pytz seaborn kt-legacy \
	grain array-record portpicker six tqdm requests certifi charset-normalizer idna urllib3
PACKAGES := constraints-packages.txt

# A server of S3 on this machine.
S3_SERVER := 'moto[s3]' flask flask-cors

# As environment variables, and not as options, they also hold for the environment in which pip builds this package;
# older versions of pip read the first there, newer ones the second.
export PIP_CONSTRAINT := $(CONSTRAINTS)
export PIP_BUILD_CONSTRAINT := $(CONSTRAINTS)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Containers set it. Each of the hundred processes of the tests would then compile three thousand modules anew: six seconds of CPU time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo dist docs test test-processes test-all compat packages ray keras-tests one-chip arm newest latest lint format matrix soak bench clean

help:
	@echo "make demo     train on handwritten digits on two placements and compare the bits"
	@echo "make docs     the docs site, into out/docs; every cell of its pages is run"
	@echo "make test     the tests of every feature; the second time programs are found compiled"
	@echo "make test-all all tests, with short forms of matrix and soak"
	@echo "make test-processes   more tests of several processes and of their faults"
	@echo "make compat   the oldest Keras; torch, TensorFlow and grain as sources of data; exports for others"
	@echo "make packages models of keras-hub, bayesflow, keras-rs and keras-tuner; PACKAGES= for the newest of each"
	@echo "make ray      trainings on Ray: a worker is killed, a node comes"
	@echo "make keras-tests   Keras' own tests in the scope of a strategy; ARGS=\"--replicas 4 layers/rnn\""
	@echo "make one-chip the tests of placements on a single device: install the extra of its kind into .venv first"
	@echo "make arm      the native kernels, compiled for Arm on any machine, but not run"
	@echo "make newest   the demo and the tests with the newest JAX, on Python 3.12 or newer, or on that of a Debian in a folder"
	@echo "make latest   the demo and the tests with the newest JAX and with keras-nightly, tried or not"
	@echo "make lint     ruff and pyright"
	@echo "make format   let ruff write"
	@echo "make matrix   the full cross of layers, precisions, placements, optimizers and sources of data, with a table (an hour)"
	@echo "make soak     the long runs"
	@echo "make dist     the wheel and the sdist, into out/dist, built twice, compared, and tried in a clean environment"
	@echo "make bench    all benchmarks, beside TensorFlow and torch, into benchmarks/RESULTS.md (hours)"
	@echo "make clean    remove .venv and its siblings"
	@echo "CONTRIBUTING.md says what runs where, and how long it takes."

demo: $(VENV)/demo.stamp
	$(BIN)/unisono demo $(ARGS)

# The name of a folder is no date of a site: it is always built. ARGS="-D nb_execution_mode=off" runs no cells.
docs: $(VENV)/docs.stamp
	$(BIN)/python -m sphinx --builder html --fail-on-warning --nitpicky --doctree-dir out/doctrees $(ARGS) docs out/docs

test: $(VENV)/dev.stamp
	UNISONO_TESTS=quick $(BIN)/$(PYTEST) -m "not slow" $(ARGS)

test-processes: $(VENV)/dev.stamp
	UNISONO_TESTS=quick $(BIN)/$(PYTEST) -m "processes and slow and not thorough" $(ARGS)

# With all that others may bring along.
test-all: $(VENV)-all/made
	UNISONO_TESTS=all $(VENV)-all/bin/$(PYTEST) $(ARGS)
	$(MAKE) packages

# What needs torch, TensorFlow or grain, and what looks into Keras.
compat: $(VENV)-compat/made
	UNISONO_TESTS=quick $(VENV)-compat/bin/$(PYTEST) -m "compat and not thorough" $(ARGS)

# Models of other packages. PACKAGES= tries the newest of each.
packages: $(VENV)-packages/layer.stamp
	$(VENV)-packages/bin/python -m pip install --quiet --no-compile --no-deps --upgrade $(OTHERS) $(addprefix --constraint ,$(PACKAGES))
	$(VENV)-packages/bin/$(PYTEST) -m packages tests/promise $(ARGS)

# Trainings on a Ray of this machine, one after another.
ray: $(VENV)-ray/made
	$(VENV)-ray/bin/python -m pytest tests/tools/ray $(ARGS)

# Keras' package brings them.
keras-tests: $(VENV)-all/made
	$(VENV)-all/bin/python tests/helpers/keras_own_tests.py $(ARGS)

# Several devices of a strategy are one device of this machine: for a single GPU.
one-chip: $(VENV)/dev.stamp
	$(BIN)/$(PYTEST) -p one_chip -m "not slow and not processes" tests/keras/callbacks tests/keras/checkpoint tests/keras/distributed tests/keras/fit \
		tests/keras/loop tests/promise tests/keras/record tests/keras/replica tests/engine/step $(ARGS)

# Zig's compiler is a package.
arm: $(VENV)/dev.stamp
	$(BIN)/python -m pip install --quiet ziglang
	$(BIN)/python tests/helpers/compile_for_arm.py out/arm

# The other end of the window of versions.
newest:
	.ci/newest "$(PYTHON)"

# Whatever is newest today, also beyond the window: Keras as it was last night. One test says which versions were tried.
latest: export UNISONO_VERSIONS := any
latest: export PIP_CONSTRAINT :=
latest:
	$(MAKE) VENV=$(VENV)-latest CONSTRAINTS=/dev/null KERAS=keras $(VENV)-latest/dev.stamp
	$(VENV)-latest/bin/python -m pip install --quiet --upgrade jax
	$(VENV)-latest/bin/python -m pip uninstall --quiet --yes keras
	$(VENV)-latest/bin/python -m pip install --quiet --no-deps --force-reinstall --pre keras-nightly
	$(VENV)-latest/bin/unisono demo
	UNISONO_TESTS=quick $(VENV)-latest/bin/$(PYTEST) -m "not slow" --deselect $(TRIED) $(ARGS)

# No limits of time: it may run on a slow or loaded machine.
matrix: $(VENV)-all/made
	UNISONO_MATRIX=full $(VENV)-all/bin/$(PYTEST) -m matrix --timeout 0 $(ARGS)
	$(VENV)-all/bin/python tests/helpers/matrix_of_threads.py
	$(VENV)-all/bin/python tests/helpers/matrix.py

# One at a time: the long runs load the machine by themselves.
soak: $(VENV)-all/made
	UNISONO_SOAK=full $(VENV)-all/bin/python -m pytest -m soak --timeout 0 $(ARGS)
	UNISONO_SOAK=full $(MAKE) ray ARGS="-m soak --timeout 0"

# Alone on the machine.
bench: $(VENV)-bench/made
	$(VENV)-bench/bin/python benchmarks/run.py --out benchmarks $(ARGS)

# Of extras the fresh environment has none; a compiler is found by the build alone.
dist: $(VENV)/dev.stamp
	$(BIN)/python tests/helpers/packages.py out/dist

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/dev.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VENV)-compat $(VENV)-packages $(VENV)-ray $(VENV)-all $(VENV)-bench $(VENV)-newest $(VENV)-latest

# A stamp is an extra of pyproject.toml that .venv has. Modules are compiled when they are imported: most never are. Those that every process
# needs are imported once, before two workers do it beside each other.
$(VENV)/%.stamp: pyproject.toml $(CONSTRAINTS) $(KERNELS) $(VENV)/made
	@echo "Installing unisono[$*] into $(VENV); this takes a minute or two the first time."
	$(BIN)/python -m pip install --quiet --no-compile $(KERAS) --editable '.[$*]'
	@KERAS_BACKEND=jax $(BIN)/python -c "import keras, jax, unisono.callbacks"
	@touch $@

$(VENV)/made:
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info >= (3, 11) or sys.exit(f"Unisono needs Python 3.11 or newer; $(PYTHON) is {v}. Write make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch==2.13.0 is a CPU build only where pip is set up for one; elsewhere it brings several GB of CUDA.
$(VENV)-all/made $(VENV)-bench/made: pyproject.toml $(CONSTRAINTS) $(KERNELS)
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile $(KERAS) torch tensorflow-cpu grain kubeflow-trainer-api $(S3_SERVER) --editable '.[dev,onnx,s3]'
	@touch $@

# A layer over $(VENV): what is not here is found there.
$(VENV)-%/layer.stamp: $(VENV)/dev.stamp
	$(PYTHON) -m venv --clear $(@D)
	$(VENV)/bin/python -c "import sysconfig; print('import site; site.addsitedir(' + repr(sysconfig.get_path('purelib')) + ')')" \
		> $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/layer.pth
	@touch $@

$(VENV)-ray/made: $(VENV)-ray/layer.stamp constraints-ray.txt
	$(@D)/bin/python -m pip install --quiet --no-compile --constraint constraints-ray.txt 'ray[train]'
	@touch $@

$(VENV)-compat/made: $(VENV)-compat/layer.stamp
	$(@D)/bin/python -m pip install --quiet --no-compile $(OLDEST_KERAS) torch tensorflow-cpu grain kubeflow-trainer-api $(S3_SERVER) --editable '.[dev,onnx,s3]'
	@touch $@
