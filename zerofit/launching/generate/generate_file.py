"""generate_file, the function behind `zerofit generate`: completions for a file of prompts."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.observer import SILENT, Observer
from zerofit.core.plan import Origin
from zerofit.core.strategy import OffloadDevice, Precision, ZeroStage
from zerofit.generation.generation_job import Gather

if TYPE_CHECKING:
    from zerofit.configs.write.command import Rendezvous
    from zerofit.core.facts import ModelFacts
    from zerofit.core.request import Request
    from zerofit.launching.generate.prompts import Prompt
    from zerofit.launching.generate.run import GenerationRun
    from zerofit.launching.generate.settings import GenerationSettings
    from zerofit.launching.nodes import Nodes
    from zerofit.planning.inference.problem import InferencePlan

_TARGET = "generate"
"""Used in the names of run folders."""
_REQUIRED_ON_NODES = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "micro_batch_size": "--batch-size",
    "precision": "--dtype",
}
"""Flags that are required on several nodes, since each plans for itself."""


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
    cpu: bool = False,
    trust_remote_code: bool = False,
    run_dir: Path = Path("zerofit-runs"),
    dry_run: bool = False,
    observer: Observer = SILENT,
    **settings: Any,
) -> GeneratedFile:
    """Write a completion for each prompt in a file, with the hardware of this machine.

    Uses the fastest layout that is estimated to fit: the whole model on each GPU, ZeRO-3 over all GPUs, or
    ZeRO-3 with parameters in host memory or on NVMe. After a kill, the same call resumes.

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
    from zerofit.core.request import Request
    from zerofit.launching.generate import model as models
    from zerofit.launching.generate import output
    from zerofit.launching.generate import prompts as prompt_files
    from zerofit.launching.generate.run import GenerationRun
    from zerofit.launching.generate.settings import given_settings, whole_settings
    from zerofit.launching.nodes import Nodes
    from zerofit.machine.versions import check_libraries

    nodes = Nodes(
        num_nodes=num_nodes,
        num_processes=num_processes,
        machine_rank=machine_rank,
        main_process_ip=main_process_ip,
        main_process_port=main_process_port,
        gpu_ids=gpu_ids,
    )
    request = Request(
        zero_stage=None if zero_stage is None else ZeroStage(zero_stage),
        param_offload=None if param_offload is None else OffloadDevice(param_offload),
        nvme_path=nvme_path,
        num_processes=num_processes,
        num_nodes=num_nodes,
        micro_batch_size=batch_size,
        precision=None if dtype is None else Precision(dtype),
        on_cpu=cpu,
    )
    _check_nodes(request, out)
    given = given_settings(settings, file=generation_config)
    output.check_out(out)
    check_libraries(observer)
    lines = prompt_files.read_prompts_file(prompts)
    folder = models.find_model(model)
    tokenizer_folder = models.find_tokenizer(tokenizer, model=folder, model_text=model)
    facts, config = models.facts_for_generation(model, folder, trust_remote_code=trust_remote_code)
    loaded = models.load_tokenizer(
        tokenizer_folder, chat_template=chat_template, trust_remote_code=trust_remote_code
    )
    whole = whole_settings(given, folder=folder, config=config, tokenizer=loaded)
    _check_assistant(whole, batch_size, num_prompts=len(lines.lines))
    found = prompt_files.tokenized(lines.lines, loaded, as_chat=chat)
    num_drafted = whole.whole.get("prompt_lookup_num_tokens") or 0
    prompt_files.check_lengths(
        found,
        max_new_tokens=whole.max_new_tokens,
        positions=models.positions_for_generation(facts, config).less(num_drafted),
        has_encoder=bool(config.is_encoder_decoder),
    )
    if lines.num_blank:
        are = "line is" if lines.num_blank == 1 else "lines are"
        observer.say(f"--prompts {prompts}: {lines.num_blank} blank {are} left out")
    plan = _plan(facts, found, whole, nodes, request, gather=Gather(gather), out=out, observer=observer)
    if chat_template and not chat and all(isinstance(line.prompt, str) for line in lines.lines):
        observer.say(f"--chat-template {chat_template} has no effect: without --chat no prompt is a chat")
    run = GenerationRun(
        model=folder,
        tokenizer=tokenizer_folder,
        trust_remote_code=trust_remote_code,
        prompts=found,
        settings=whole,
        plan=plan,
        gather=Gather(gather),
        seed=seed,
        out=out,
        rendezvous=_rendezvous(nodes, plan),
    )
    observer.say(f"generation: {whole.line(seed=seed)}")
    if num_done := run.count_done():
        observer.say(f"{num_done} of {len(found)} prompts are already done")
    return _start(run, run_dir, dry_run=dry_run, observer=observer)


def _check_nodes(request: Request, out: str) -> None:
    """Check that several nodes, each of which plans for itself, get the same plan and one file."""
    if (request.num_nodes or 1) == 1:
        return
    if out == "-":
        raise UserError(
            "generate-nodes-need-file",
            "several nodes need a file for the results",
            found=f"--out - with --num-machines {request.num_nodes}",
            why="the ranks of all nodes write their results beside it, to be merged at the end",
            fix="name a file on a file system that all nodes share",
        )
    missing = ", ".join(flag for name, flag in _REQUIRED_ON_NODES.items() if getattr(request, name) is None)
    if missing:
        raise UserError(
            "nodes-need-one-plan",
            "several nodes need one plan",
            found=f"--num-machines {request.num_nodes} without {missing}",
            why="each node plans separately, and nodes with different plans wait for each other forever",
            fix=f"set {missing} on every node; `--dry-run` on one of them shows what fits",
        )


def _check_assistant(settings: GenerationSettings, batch_size: int | None, *, num_prompts: int) -> None:
    """Check that assisted generation has one prompt per batch."""
    from zerofit.generation.lockstep import check_assistant

    try:
        check_assistant(settings.call, batch_size=batch_size or num_prompts)
    except UserError as error:
        error.found = f"--batch-size {batch_size}" if batch_size else "no --batch-size"
        error.fix = "add --batch-size 1, or leave the assistant out of the settings"
        raise


def _plan(
    facts: ModelFacts,
    prompts: tuple[Prompt, ...],
    settings: GenerationSettings,
    nodes: Nodes,
    request: Request,
    *,
    gather: Gather,
    out: str,
    observer: Observer,
) -> InferencePlan:
    """Return the plan, if it fits."""
    from zerofit.generation.results.parts import parts_folder
    from zerofit.launching.checks import check_gpu_is_here, check_nvme_path
    from zerofit.launching.generate.output import earlier_batch_size
    from zerofit.machine.this_node import probe_machine
    from zerofit.machine.versions import probe_versions
    from zerofit.planning.inference.plan_inference import plan_inference
    from zerofit.planning.inference.plan_table import inference_table
    from zerofit.planning.inference.problem import InferenceWorkload
    from zerofit.planning.plan import DOES_NOT_FIT

    # The batch determines the seed: resumed sampling must use the original batches.
    drawn = earlier_batch_size(out) if settings.samples and request.micro_batch_size is None else None
    machine = probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=request.on_cpu)
    if not request.on_cpu:
        check_gpu_is_here(machine)
    plan = plan_inference(
        model=facts,
        machine=machine,
        versions=probe_versions(),
        workload=InferenceWorkload(
            num_prompts=len(prompts),
            longest_prompt=max(len(prompt.tokens) for prompt in prompts),
            max_new_tokens=settings.max_new_tokens,
            num_beams=settings.call.config.num_beams or 1,
            num_return_sequences=settings.call.num_return_sequences,
            gather=gather,
        ),
        request=request if drawn is None else replace(request, micro_batch_size=drawn),
    )
    if drawn is not None:
        plan = _with_earlier_batch_size(plan, parts_folder(Path(out)))
    observer.show(f"{inference_table(plan)}\n")
    if not plan.fits:
        raise UserError(
            "nothing-fits",
            "no layout fits",
            found=f"--model {facts.name}: {plan.chosen.shortage}",
            why="zerofit does not start runs that would run out of memory",
            fix=plan.suggestions[0] if plan.suggestions else "use a smaller model, or a larger machine",
            exit_code=DOES_NOT_FIT,
        )
    check_nvme_path(plan.as_plan())
    return plan


def _with_earlier_batch_size(plan: InferencePlan, parts: Path) -> InferencePlan:
    """Return the plan with the unfinished results as reason for its batch size."""
    why = f"from the unfinished results in {parts}: other batches sample other tokens"
    suggestions = {"leave out --batch-size": f"rm -r {parts}, to restart with smaller batches"}
    return replace(
        plan,
        reasons=tuple(
            replace(one, why=why, origin=Origin.PLANNER) if one.field == "micro_batch_size" else one
            for one in plan.reasons
        ),
        suggestions=tuple(suggestions.get(words, words) for words in plan.suggestions),
    )


def _rendezvous(nodes: Nodes, plan: InferencePlan) -> Rendezvous:
    """Return the rendezvous, with the GPUs of this node that the ranks use."""
    from zerofit.configs.write.command import first_gpu, is_on_one_of_many_gpus
    from zerofit.launching.nodes import find_rendezvous

    found = find_rendezvous(nodes, plan.topology)
    if not is_on_one_of_many_gpus(plan.as_plan()):
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
