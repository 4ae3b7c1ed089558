"""generate_file, the function behind `zerofit generate`: completions for a file of prompts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage
from zerofit.generation.generation_job import Gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.configs.write.command import Rendezvous
    from zerofit.core.facts import Machine
    from zerofit.core.plan import Plan
    from zerofit.generation.prompts import Tokens
    from zerofit.launching.generate.run import GenerationRun
    from zerofit.launching.generate.settings import GenerationSettings
    from zerofit.models.source import ModelSource
    from zerofit.models.trace.generation import GenerateCall, GenerationTrace
    from zerofit.planning.generation import GenerationPlan
    from zerofit.planning.run_spec import RunSpec
    from zerofit.planning.sources.nodes import Nodes

_TARGET = "generate"
"""Used in the names of run folders."""
_REQUIRED_ON_NODES = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "micro_batch_size": "--batch-size",
    "precision": "--dtype",
}
"""Flags that are required on several nodes, since each plans for itself."""
_OF_LAYOUT = ("zero_stage", "param_offload", "micro_batch_size", "world_size")
"""Fields that keep the planner from another layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFile:
    """The result of a run, or with dry_run what it would do."""

    results: Path
    """The file with the completions, which exists if the exit code is 0."""
    run_folder: Path
    files: dict[Path, str]
    """Texts of the run folder's files before the start, by path."""
    command: str
    """The command that starts the ranks, for a shell."""
    exit_code: int = 0
    """0: success; 1: a rank failed; 128 + N: ended by signal N."""


def generate_file(
    model: str,
    prompts: str,
    out: str,
    *,
    tokenizer: str | None = None,
    generation_config: Path | None = None,
    seed: int = 0,
    chat: bool = False,
    chat_template: Path | None = None,
    batch_size: int | None = None,
    dtype: Precision | str | None = None,
    gather: Gather | str = Gather.AUTO,
    zero_stage: ZeroStage | int | None = None,
    param_offload: OffloadDevice | str | None = None,
    nvme_path: str | None = None,
    num_processes: int | None = None,
    num_nodes: int | None = None,
    machine_rank: int | None = None,
    main_process_ip: str | None = None,
    main_process_port: int | None = None,
    gpu_ids: str | None = None,
    gpus: str | None = None,
    cpu: bool = False,
    trust_remote_code: bool = False,
    run_dir: Path = Path("zerofit-runs"),
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> GeneratedFile:
    """Write a completion for each prompt in a file, with the hardware of this machine.

    Uses the first layout that is estimated to fit: the whole model on each GPU, ZeRO-3 over all GPUs, or
    ZeRO-3 with the weights in host memory. After a kill, the same call resumes.

    Args:
        model: folder of the model, or a cached hub id.
        prompts: .txt with one prompt per line, or .jsonl with a string, or an object with "prompt" or
            "messages", per line; "-" reads JSONL from standard input.
        out: JSONL file for the completions, which must not exist; "-" writes to standard output at the end.
        tokenizer: folder or cached hub id; by default the model's own.
        generation_config: JSON file with settings of transformers' GenerationConfig.
        seed: of sampling.
        chat: whether plain prompts are user messages of a chat.
        chat_template: Jinja file that replaces the tokenizer's own template.
        batch_size: prompts per call on one rank.
        dtype: format of the weights: "fp32", "fp16" or "bf16"; by default the model's own.
        gather: under ZeRO-3, "always" gathers the weights at once, "never" layer by layer for every token.
        zero_stage: 0 for the whole model on each rank, 3 to partition it.
        param_offload: where parameters are stored under ZeRO-3: "none", "cpu" or "nvme".
        nvme_path: folder on the NVMe disk, for offload to nvme.
        num_processes: ranks on all nodes together; by default one per GPU.
        num_nodes: number of nodes; each makes this call.
        machine_rank: this node's number, from 0.
        main_process_ip: address of node 0.
        main_process_port: port on node 0.
        gpu_ids: GPUs of this node to use, such as "0,2".
        gpus: GPUs of another machine to plan for, such as "8xA100-80G", with dry_run only.
        cpu: whether to generate on the CPU, ignoring GPUs.
        trust_remote_code: whether to run Python code that comes with the model.
        run_dir: folder of all run folders.
        dry_run: whether to write and start nothing.
        observer: receives progress and the plan, even if nothing fits; silent by default.
        **settings: of transformers' GenerationConfig, such as max_new_tokens, temperature, num_beams; they
            override generation_config, which overrides the model's own.

    Raises:
        UserError: an argument is wrong, or nothing fits; nothing was started.
    """
    # Imported here: they load much code, which --help does not need.
    from zerofit.generation.lockstep import check_assistant
    from zerofit.launching.checks import check_nvme_path
    from zerofit.launching.generate import output
    from zerofit.launching.generate import prompts as prompt_files
    from zerofit.launching.generate.run import GenerationRun
    from zerofit.launching.generate.settings import given_settings, whole_settings
    from zerofit.machine.versions import check_libraries
    from zerofit.planning.generation import generation_table
    from zerofit.planning.resolve import Verb, resolve

    spec = resolve(
        None,
        verb=Verb.GENERATE,
        zero_stage=zero_stage,
        param_offload=param_offload,
        nvme_path=nvme_path,
        micro_batch_size=batch_size,
        precision=dtype,
        num_processes=num_processes,
        num_nodes=num_nodes,
        machine_rank=machine_rank,
        main_process_ip=main_process_ip,
        main_process_port=main_process_port,
        gpu_ids=gpu_ids,
        gpus=gpus,
        on_cpu=cpu,
        dry_run=dry_run,
        observer=observer,
    )
    _check_nodes(spec, out)
    _check_gpus(gpus, cpu=cpu, dry_run=dry_run)
    given = given_settings(settings, file=generation_config)
    output.check_out(out)
    check_libraries(observer)
    lines = prompt_files.read_prompts_file(prompts)
    parts = _read_model(model, tokenizer, chat_template, trust_remote_code=trust_remote_code)
    whole = whole_settings(given, folder=parts.folder, config=parts.config, tokenizer=parts.tokenizer)
    with _in_flags():
        check_assistant(whole.call, batch_size=batch_size or len(lines))
    tokens = prompt_files.tokenized(lines, parts.tokenizer, as_chat=chat)
    _check_lengths(tokens, whole, parts)
    machine = _machine(spec)
    # Each batch has its own seed: resumed sampling must use the original batches.
    earlier = output.kept_batch_size(out) if whole.samples and batch_size is None else None
    spec = spec if earlier is None else spec.setting("--resume", micro_batch_size=earlier)
    call = _call(tokens, whole)
    planned = _planned(parts.source, call, machine, spec, num_prompts=len(lines), gather=Gather(gather))
    observer.show(f"{generation_table(planned)}\n")
    _check_fit(planned, spec, is_resumed=earlier is not None)
    plan = planned.as_plan()
    if gpus is None:
        check_nvme_path(plan)
    run = GenerationRun(
        model=parts.folder,
        tokenizer=parts.tokenizer_folder,
        trust_remote_code=trust_remote_code,
        lines=lines,
        prompts=tokens,
        settings=whole,
        plan=plan,
        largest_parameter=parts.source.facts.largest_parameter,
        gather=Gather(gather),
        seed=seed,
        out=out,
        rendezvous=_rendezvous(spec.nodes, plan),
    )
    observer.say(f"generation: {whole.line(seed=seed)}")
    if num_done := run.count_done():
        observer.say(f"{num_done} of {len(lines)} prompts are already done")
    return _start(run, run_dir, dry_run=dry_run, observer=observer)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model's folder and what was read from it."""

    folder: Path
    tokenizer_folder: Path
    source: ModelSource
    config: Any
    """transformers' PretrainedConfig."""
    tokenizer: Any
    """transformers' PreTrainedTokenizerBase."""


def _read_model(
    model: str, tokenizer: str | None, chat_template: Path | None, *, trust_remote_code: bool
) -> _Model:
    """Find a model and its tokenizer, and read what its weights don't contain."""
    from zerofit.launching.generate import model as models

    folder = models.find_model(model)
    tokenizer_folder = models.find_tokenizer(tokenizer, model=folder, model_text=model)
    source, config = models.source_for_generation(model, folder, trust_remote_code=trust_remote_code)
    loaded = models.load_tokenizer(
        tokenizer_folder, chat_template=chat_template, trust_remote_code=trust_remote_code
    )
    return _Model(
        folder=folder, tokenizer_folder=tokenizer_folder, source=source, config=config, tokenizer=loaded
    )


def _check_lengths(tokens: Sequence[Tokens], whole: GenerationSettings, parts: _Model) -> None:
    """Check that each prompt and its completion fit into the model's positions."""
    from zerofit.generation.prompts import check_lengths
    from zerofit.launching.generate.model import positions_for_generation

    positions = positions_for_generation(parts.source.facts, parts.config)
    with _in_flags():
        check_lengths(
            tokens,
            [whole.max_new_tokens] * len(tokens),
            positions.less(whole.call.config.prompt_lookup_num_tokens or 0),
            is_encoder_decoder=bool(parts.config.is_encoder_decoder),
        )


def _call(tokens: Sequence[Tokens], whole: GenerationSettings) -> GenerateCall:
    """Return the largest call of model.generate, which the plan is for."""
    from zerofit.models.trace.generation import GenerateCall

    return GenerateCall(
        prompt_length=max(map(len, tokens)),
        max_new_tokens=whole.max_new_tokens,
        num_beams=whole.call.config.num_beams or 1,
        num_return_sequences=whole.call.num_return_sequences,
        samples=whole.samples,
    )


def _check_nodes(spec: RunSpec, out: str) -> None:
    """Check that several nodes, each of which plans for itself, get the same plan and one file."""
    if (num_nodes := spec.overrides.get("num_nodes") or 1) == 1:
        return
    if out == "-":
        raise UserError(
            "generate-nodes-need-file",
            "several nodes need a file for the results",
            found=f"--out - with --num-machines {num_nodes}",
            why="the ranks of all nodes write their results beside it, to be merged at the end",
            fix="name a file on a file system that all nodes share",
        )
    missing = ", ".join(flag for name, flag in _REQUIRED_ON_NODES.items() if not spec.overrides.has(name))
    if missing:
        raise UserError(
            "nodes-need-one-plan",
            "several nodes need one plan",
            found=f"--num-machines {num_nodes} without {missing}",
            why="each node plans separately, and nodes with different plans wait for each other forever",
            fix=f"set {missing} on every node; `--dry-run` on one of them shows what fits",
        )


@contextmanager
def _in_flags() -> Iterator[None]:
    """Name flags in errors of zerofit.generate(), in place of its arguments."""
    try:
        yield
    except UserError as error:
        for argument, flag in (("max_new_tokens=", "--max-new-tokens "), ("batch_size=", "--batch-size ")):
            error.found, error.fix = (text.replace(argument, flag) for text in (error.found, error.fix))
        raise


def _check_gpus(gpus: str | None, *, cpu: bool, dry_run: bool) -> None:
    if gpus is not None and (cpu or not dry_run):
        raise UserError(
            "generate-gpus-elsewhere",
            "a run is on the GPUs of this machine",
            found=f"--gpus {gpus} {'with --cpu' if cpu else 'without --dry-run'}",
            why="--gpus names those of another machine, to see what would run there",
            fix="leave out --cpu" if cpu else "add --dry-run, or leave out --gpus",
        )


def _machine(spec: RunSpec) -> Machine:
    """Return the machine to plan for: this one, or the one that --gpus names."""
    from zerofit.launching.checks import check_gpu_is_here
    from zerofit.machine.machine_spec import machine_of_spec
    from zerofit.machine.this_node import probe_machine

    if spec.gpus is not None:
        return machine_of_spec(spec.gpus, num_nodes=spec.overrides.get("num_nodes") or 1).machine
    machine = probe_machine(gpu_ids=spec.nodes.gpu_indices, may_be_unreadable=spec.on_cpu)
    if not spec.on_cpu:
        check_gpu_is_here(machine)
    return machine


def _planned(
    source: ModelSource,
    call: GenerateCall,
    machine: Machine,
    spec: RunSpec,
    *,
    num_prompts: int,
    gather: Gather,
) -> GenerationPlan:
    """Return the plan, whether it fits or not."""
    from zerofit.core.strategy import DTYPES
    from zerofit.machine.versions import probe_versions
    from zerofit.planning.generation import GenerationProblem, check_spec, plan_generation

    versions = probe_versions()
    check_spec(spec, machine=machine, versions=versions, gather=gather)
    precision = spec.overrides.get("precision") or DTYPES.get(source.facts.checkpoint_dtype, Precision.FP32)
    problem = GenerationProblem(
        model=source.facts,
        call=call,
        trace=None,
        precision=precision,
        machine=machine,
        versions=versions,
        spec=spec,
        num_prompts=num_prompts,
        gather=gather,
    )
    gpu = problem.gpu
    trace = _trace(source, call, precision, spec, capability=gpu.compute_capability if gpu else None)
    return plan_generation(replace(problem, trace=trace))


def _trace(
    source: ModelSource,
    call: GenerateCall,
    precision: Precision,
    spec: RunSpec,
    *,
    capability: tuple[int, int] | None,
) -> GenerationTrace | None:
    """Return the model's traced passes; None if it can't be traced and the flags leave nothing to plan."""
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.trace.cache import default_cache_folder
    from zerofit.models.trace.generation import trace_generation

    asked = TraceRequest(sequence_length=call.prompt_length, weights=precision)
    if capability is not None:
        asked = replace(asked, compute_capability=capability)
    try:
        folder = default_cache_folder(os.environ, Path.home())
        return trace_generation(source, call, asked, cache_folder=folder, as_on_cuda=capability is not None)
    except UserError as error:
        if spec.overrides.has("zero_stage") and spec.overrides.has("micro_batch_size"):
            return None
        error.fix = "give --zero-stage 0 or 3 and --batch-size: with both it starts without an estimate"
        raise


def _check_fit(planned: GenerationPlan, spec: RunSpec, *, is_resumed: bool) -> None:
    from zerofit.planning.generation import FLAGS
    from zerofit.planning.plan import DOES_NOT_FIT

    if planned.fits:
        return
    pinned = [FLAGS[name] for name in _OF_LAYOUT if spec.overrides.has(name)]
    more = "use more or larger GPUs, --param-offload nvme with --nvme-path, or a smaller --max-new-tokens"
    if is_resumed:
        pinned, more = [], f"{more}, or write to another --out: the unfinished results fix the batch size"
    raise UserError(
        "nothing-fits",
        "no layout fits",
        found=f"--model {planned.problem.model.name}: {planned.chosen.shortage}",
        why="zerofit does not start runs that would run out of memory",
        fix=f"leave out {' and '.join(pinned)}, or {more}" if pinned else more,
        exit_code=DOES_NOT_FIT,
    )


def _rendezvous(nodes: Nodes, plan: Plan) -> Rendezvous:
    """Return the rendezvous, with the GPUs of this node that the ranks use."""
    from zerofit.configs.write.command import first_gpu, is_on_one_of_many_gpus
    from zerofit.launching.nodes import find_rendezvous

    found = find_rendezvous(nodes, plan.topology)
    if not is_on_one_of_many_gpus(plan):
        return found
    return replace(found, gpu_ids=first_gpu(nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES")))


def _start(run: GenerationRun, run_dir: Path, *, dry_run: bool, observer: Observer) -> GeneratedFile:
    """Write the run folder, start the ranks and wait for their end; with dry_run, only report it."""
    from zerofit.launching.generate import output
    from zerofit.launching.run_folder import fill_run_folder, new_run_folder, run_folder
    from zerofit.launching.start import launch_command, start

    folder = (run_folder if dry_run else new_run_folder)(run_dir, target=_TARGET, at=datetime.now())
    launch, files, results = run.launch(folder), run.files(folder), run.out_file(folder)
    ended = GeneratedFile(
        results=results, run_folder=folder.path, files=files, command=launch_command(launch, folder)
    )
    if dry_run:
        return ended
    fill_run_folder(folder, files)
    observer.say(f"run folder {folder.path}")
    observer.say(f"command: {ended.command}")
    with output.stdout_is_stderr():
        verdict = start(launch, folder)
    if verdict.cause:
        observer.say(f"{verdict.cause}; its log and record are in {folder.path}")
        is_named = run.out != output.STDOUT
        if kept := output.kept_words(results, num_prompts=len(run.prompts), is_named=is_named):
            observer.say(kept)
    elif run.out == output.STDOUT:
        output.copy_to_stdout(results)
    return replace(ended, exit_code=verdict.exit_code)
