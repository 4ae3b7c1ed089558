"""generate_file: what `zerofit generate` does: prompts in, completions out, under the fastest layout."""

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
"""Run folders of `zerofit generate` are named after this."""
_MUST_SAY = {
    "zero_stage": "--zero-stage",
    "param_offload": "--param-offload",
    "micro_batch_size": "--batch-size",
    "precision": "--dtype",
}
"""Flags that each of several nodes needs, as each plans for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedFile:
    """How a run ended, or with dry_run what it would do."""

    results: Path
    """The file with the completions, which is there if the exit code is 0."""
    run_folder: Path
    files: dict[Path, str]
    """Text of the files that the run folder got before the start, by path."""
    command: str
    """The command that started the ranks, for a shell."""
    exit_code: int = 0
    """0: all is done; 1: a rank failed; 128 + N: signal N ended it."""


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
    """Write a completion for each prompt of a file, with what this machine has.

    The fastest layout that fits, by an estimate: the whole model on each GPU, ZeRO-3 over all of them, or
    ZeRO-3 with parameters in host memory or on NVMe. Called again after a kill, it does only what is missing.

    Args:
        model: folder of the model, or a cached hub id.
        prompts: .txt with a prompt a line, or .jsonl with a string, or an object with "prompt" or "messages",
            a line; "-" reads JSONL from standard input.
        out: JSONL file for the completions, which must not be there; "-" is standard output, at the end.
        tokenizer: folder or cached hub id; the model's own, if left out.
        generation_config: JSON file with settings of transformers' GenerationConfig.
        seed: of sampling.
        chat: whether plain prompts are what a user says in a chat.
        chat_template: Jinja file in place of the tokenizer's own template.
        batch_size: prompts in one call on one rank.
        dtype: format of the weights: "fp32", "fp16" or "bf16"; the model's own, if left out.
        gather: under ZeRO-3, "always" gathers the weights once, "never" layer by layer for every token.
        zero_stage: 0 for the whole model on each rank, 3 for a part of it on each.
        param_offload: where the parts of the model rest under ZeRO-3: "none", "cpu" or "nvme".
        nvme_path: folder on the NVMe disk, for offload to nvme.
        num_processes: ranks on all nodes together; one a GPU, if left out.
        num_nodes: nodes that take part; each makes this call.
        machine_rank: this node's number, from 0.
        main_process_ip: address of node 0.
        main_process_port: port on node 0.
        gpu_ids: GPUs of this node to use, such as "0,2".
        cpu: whether to leave GPUs alone, and generate on the CPU.
        trust_remote_code: whether to run Python code that comes with the model.
        run_dir: folder of all run folders.
        dry_run: whether to write and start nothing.
        observer: is told of what is done, and shown the plan, also where nothing fits; silent by default.
        **settings: of transformers' GenerationConfig, such as max_new_tokens, temperature, num_beams;
            they come before generation_config, and that before the model's own.

    Raises:
        UserError: something of this is wrong, or nothing fits; nothing was started.
    """
    # Only here: they bring much code, which --help does not need.
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
    facts, config = models.generating_facts(model, folder, trust_remote_code=trust_remote_code)
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
        positions=models.generating_positions(facts, config).less(num_drafted),
        has_encoder=bool(config.is_encoder_decoder),
    )
    if lines.num_blank:
        are = "line is" if lines.num_blank == 1 else "lines are"
        observer.say(f"--prompts {prompts}: {lines.num_blank} blank {are} left out")
    plan = _plan(facts, found, whole, nodes, request, gather=Gather(gather), out=out, observer=observer)
    if chat_template and not chat and all(isinstance(line.prompt, str) for line in lines.lines):
        observer.say(f"--chat-template {chat_template} changes nothing: no prompt is a chat without --chat")
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
        observer.say(f"{num_done} of {len(found)} prompts are done already")
    return _start(run, run_dir, dry_run=dry_run, observer=observer)


def _check_nodes(request: Request, out: str) -> None:
    """Check that several nodes, each of which plans for itself, come to the same plan and one file."""
    if (request.num_nodes or 1) == 1:
        return
    if out == "-":
        raise UserError(
            "generate-nodes-need-file",
            "several nodes need a file for the results",
            found=f"--out - with --num-machines {request.num_nodes}",
            why="the ranks of all nodes keep their results beside it, until they are put together",
            fix="name a file on a file system that all nodes share",
        )
    missing = ", ".join(flag for name, flag in _MUST_SAY.items() if getattr(request, name) is None)
    if missing:
        raise UserError(
            "nodes-need-one-plan",
            "several nodes need one plan",
            found=f"--num-machines {request.num_nodes} without {missing}",
            why="each node plans by itself, and nodes whose plans differ wait for each other forever",
            fix=f"give {missing} on every node; `--dry-run` on one of them says what fits",
        )


def _check_assistant(settings: GenerationSettings, batch_size: int | None, *, num_prompts: int) -> None:
    """Check that tokens are proposed for one prompt at a time."""
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
    from zerofit.launching.generate.output import drawn_batch_size
    from zerofit.machine.this_node import probe_machine
    from zerofit.machine.versions import probe_versions
    from zerofit.planning.inference.plan_inference import plan_inference
    from zerofit.planning.inference.plan_table import inference_table
    from zerofit.planning.inference.problem import InferenceWorkload
    from zerofit.planning.plan import DOES_NOT_FIT

    # Each batch has its own seed: tokens are drawn in the batches in which the first of them were.
    drawn = drawn_batch_size(out) if settings.samples and request.micro_batch_size is None else None
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
        plan = _drawn_before(plan, parts_folder(Path(out)))
    observer.show(f"{inference_table(plan)}\n")
    if not plan.fits:
        raise UserError(
            "nothing-fits",
            "no layout fits",
            found=f"--model {facts.name}: {plan.chosen.shortage}",
            why="zerofit does not start what will run out of memory",
            fix=plan.suggestions[0] if plan.suggestions else "take a smaller model, or a larger machine",
            exit_code=DOES_NOT_FIT,
        )
    check_nvme_path(plan.as_plan())
    return plan


def _drawn_before(plan: InferencePlan, parts: Path) -> InferencePlan:
    """Return the plan with what it says of --batch-size said of the unfinished results that decide it."""
    why = f"that of the unfinished results in {parts}: other batches draw other tokens"
    suggestions = {"leave out --batch-size": f"rm -r {parts}, to begin anew in smaller batches"}
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
    """Write the run folder, start the ranks and wait for their end; with dry_run, say what that would be."""
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
