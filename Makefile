# Each target sets up all that it needs: the first run installs into .venv, later runs start at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MUTATION ?= .mutation
MINUTES ?= 55
BUDGET ?= 9m
SETS ?= oldest transformers-5.17 python-3.13 newest
OUT ?= benchmarks/measured
FAULTS ?= tests/faults tests/launching/test_checkpoints.py tests/launching/test_recover_runs.py
FAULTS_CI := $(addprefix tests/faults/test_,ends.py hangs.py saved_state.py told_to_stop.py)
SLURM ?=
ONLY ?=
PLANS ?= plans.jsonl
# One worker more than cores: a launch waits for its ranks a third of its time.
WORKERS ?= $(shell echo $$(($$(nproc) + 1)))
PARALLEL ?= -n $(WORKERS) --dist loadfile --no-loadscope-reorder
SPREAD := -n $(WORKERS) --dist worksteal
MEASURE = HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/measure_gpu.py --out $(OUT) --budget $(BUDGET) $(if $(CPU),--cpu)

.PHONY: accelerate-programs help demo test test-slow semantics faults faults-ci test-long test-slurm test-nvme test-published test-versions evidence lint mutation presets docs site dist-check catalog catalog-history bench-published bench-reports bench-accuracy bench-ranks bench-regret bench-plans bench-gpu bench-fuzz fuzz-lines fuzz-readers bench-capture bench-real-scripts bench-fsdp2 bench-fsdp2-scripts bench-split bench-bucketing bench-generation bench-overhead bench-start bench-tune clean

help:  ## what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## */\t/'

$(VENV)/.installed: pyproject.toml constraints.txt setup.sh
	@PYTHON=$(PYTHON) VENV=$(VENV) ./setup.sh

demo: export TORCH_EXTENSIONS_DIR ?= $(abspath $(VENV))/torch_extensions
demo: $(VENV)/.installed  ## train a real model under ZeRO-3 on two ranks, then in one process
	@$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## the test suite, on all cores; a file's tests stay in one process
	@$(BIN)/python -m pytest $(PARALLEL)

test-long: $(VENV)/.installed  ## the tests that make test leaves out for their time alone (tests/long_tests.json)
	@$(BIN)/python -m pytest $(PARALLEL) -m 'long and not slow and not nvme and not evidence and not versions and not faults and not slurm'

test-slow: $(VENV)/.installed  ## the tests that are too slow to run at each change
	@$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not nvme and not evidence and not versions and not faults and not slurm'

semantics: $(VENV)/.installed  ## scripts train under zerofit as by themselves: every comparison; ONLY=slow: those that make test leaves out
	@$(BIN)/python -m pytest $(SPREAD) -m "$(ONLY)" tests/semantics

faults: $(VENV)/.installed  ## real faults in real runs: ranks, launchers and disks that fail; FAULTS=FILES: some
	@$(BIN)/python -m pytest $(SPREAD) $(FAULTS) -m ""

faults-ci: $(VENV)/.installed  ## those that .ci/run has time for: how runs end, hang and stop, and what they have saved
	@$(BIN)/python -m pytest $(SPREAD) $(FAULTS_CI) -m 'faults and not slow'

test-slurm: $(VENV)/.installed  ## runs on a real Slurm of two nodes, which the tests start; needs root, slurm-wlm, munge, iproute2; SLURM=asks: some
	@$(BIN)/python -m pytest tests/clusters -m slurm -k '$(SLURM)' --timeout 900

test-nvme: $(VENV)/.installed  ## the tests of offload to NVMe; needs libaio-dev
	@$(BIN)/python -m pytest -m nvme --timeout 1500

test-published: $(VENV)/.installed  ## predicts all published runs again, and compares with what is recorded; ONLY="not slow": some of each source
	@$(BIN)/python -m pytest $(SPREAD) -m "evidence$(if $(ONLY), and $(ONLY))" tests/planning/estimate/test_published.py tests/benchmarks/test_measured_gpu.py

test-versions: $(VENV)/.installed  ## smoke tests on sets of versions, each in an environment of its own; SETS="oldest newest"
	@PYTHON=$(PYTHON) VENV=$(VENV) versions/test.sh $(SETS)

evidence: $(VENV)/.installed  ## run what rules and estimates say against the real libraries; EVIDENCE=--anew forgets what ran; needs libaio-dev
	@$(BIN)/python -m pytest tests tests/evidence -m evidence $(EVIDENCE)

accelerate-programs: $(VENV)/.installed  ## accelerate's own test programs under both launchers; writes the table of docs/reference/programs.md
	@$(BIN)/python -m pytest tests/semantics/test_accelerates_programs.py -m evidence && $(BIN)/python -m tools.write_docs

lint: $(VENV)/.installed  ## ruff and mypy --strict
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

mutation: $(VENV)/.installed  ## the share of 301 small changes to the code that a test fails by, in parts of MINUTES=55; AFTER=DIR MAP=DIR: those of an earlier run, its map
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[mutation]'
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/mutation_score.py $(MUTATION) --minutes $(MINUTES) $(if $(AFTER),--after $(AFTER)) $(if $(MAP),--map $(MAP))

presets: $(VENV)/.installed  ## render ds_configs/ anew from zerofit/core/presets.py, and the recipes of launch/
	@$(BIN)/python -m tools.write_presets
	@$(BIN)/python -m tools.write_recipes

docs: $(VENV)/.installed  ## render docs/reference/ anew from zerofit/checking/rules/ and tests/evidence/measured/
	@$(BIN)/python -m tools.write_docs

site: export NO_MKDOCS_2_WARNING := 1
site: $(VENV)/.installed  ## build the pages of docs/ as a site, with the page of every rule and its examples, into dist/site
	@$(BIN)/mkdocs build --quiet

dist-check: ## build wheel and sdist, check them, and run the wheel from an empty environment
	@PYTHON=$(PYTHON) tools/check_dist.sh

catalog: $(VENV)/.installed  ## add the installed libraries' releases to zerofit/catalog/*.json, and read model_sizes.toml anew
	@$(BIN)/python -m tools.write_catalog

catalog-history: $(VENV)/.installed  ## read zerofit/catalog/*.json anew off every supported release; needs a network, an hour
	@$(BIN)/python -m tools.write_catalog_history

bench-published: $(VENV)/.installed  ## predict published measurements of memory and of time, and the published ladder of strategies
	@for what in published published_steps published_fsdp_steps published_lengths ladder side_by_side; do HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/$$what.py || exit 1; done

bench-reports: $(VENV)/.installed  ## users' runs, predicted beside measured, from a folder of `zerofit runs report`; REPORTS=DIR
	@$(BIN)/python benchmarks/published.py --reports "$(REPORTS)"

bench-accuracy: $(VENV)/.installed  ## measure memory and time on the GPU beside the prediction; BUDGET=8m OUT=DIR CPU=1
	@$(MEASURE) --sections context,accuracy

bench-ranks: $(VENV)/.installed  ## rank 0 of many under the real DeepSpeed engine, on one GPU; BUDGET=8m OUT=DIR CPU=1
	@$(MEASURE) --sections ranks

bench-plans: $(VENV)/.installed  ## plans of 320 problems drawn by a seed, to compare before and after a change; PLANS=FILE
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/plan_problems.py $(PLANS)

bench-regret: $(VENV)/.installed  ## the plan's choice against all other strategies, within limits of memory; BUDGET=8m OUT=DIR CPU=1
	@$(MEASURE) --sections regret

bench-gpu: $(VENV)/.installed  ## all of these and the published ladder, as much as BUDGET=9m allows; OUT=DIR CPU=1
	@$(MEASURE)

bench-fuzz: $(VENV)/.installed  ## 20,000 damaged configurations through zerofit check
	@$(BIN)/python benchmarks/fuzz_check.py

fuzz-lines: $(VENV)/.installed  ## 2,000 command lines drawn over all verbs in forks, and 100 as processes
	@HF_HUB_OFFLINE=1 $(BIN)/python benchmarks/fuzz_lines.py

fuzz-readers: $(VENV)/.installed  ## coverage-guided fuzzing of the readers, 20 minutes each; needs pip install atheris
	@for what in logs documents records plans; do $(BIN)/python benchmarks/fuzz_readers.py $$what || exit 1; done

bench-capture: $(VENV)/.installed  ## time and memory of capture beside the plain start of the same scripts; SCRIPTS=DIR
	@$(BIN)/python benchmarks/capture_cost.py --scripts $(SCRIPTS)

bench-real-scripts: $(VENV)/.installed  ## run others' training scripts plainly and by zerofit, and compare; SCRIPTS=DIR FOLDER=DIR
	@$(BIN)/python benchmarks/real_scripts.py --scripts $(SCRIPTS) --folder $(FOLDER) --out $(FOLDER)/results.json

bench-fsdp2-scripts: $(VENV)/.installed  ## both examples and others' scripts under FSDP2 on CPU ranks, beside one process; SCRIPTS=DIR FOLDER=DIR
	@$(BIN)/python benchmarks/real_scripts.py --sharded --keep --scripts $(SCRIPTS) --folder $(FOLDER) --out $(FOLDER)/sharded.json

bench-fsdp2: $(VENV)/.installed  ## live tensors of real FSDP2 on CPU ranks, beside its trace; half an hour on two cores
	@$(BIN)/python benchmarks/fsdp2_memory.py

bench-split: $(VENV)/.installed  ## micro-batches by splitting the forward pass against smaller batches of the DataLoader
	@$(BIN)/python benchmarks/split_forward.py

bench-bucketing: $(VENV)/.installed  ## real tokens a second on ragged data: fixed padding, dynamic padding, bucketed batches
	@$(BIN)/python benchmarks/bucketing.py

bench-generation: $(VENV)/.installed  ## new tokens a second under ZeRO-3: weights layer by layer against gathered once
	@$(BIN)/python benchmarks/generation.py

bench-start: $(VENV)/.installed  ## how long a plan takes: cold, again, another batch, by closed forms
	@$(BIN)/python benchmarks/start_times.py

bench-overhead: $(VENV)/.installed  ## what `zerofit launch` adds to plain `accelerate launch`, and observation to that
	@$(BIN)/python benchmarks/launch_overhead.py
	@$(BIN)/python benchmarks/launch_overhead.py --observation --num-pairs 5

bench-tune: $(VENV)/.installed  ## how much slower than the best of small grids `zerofit tune` ends
	@$(BIN)/python benchmarks/tune_regret.py

clean:  ## remove the environment and all caches
	@rm -rf $(VENV) $(VENV)-* .mypy_cache .ruff_cache .pytest_cache
