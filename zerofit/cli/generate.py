"""zerofit generate: prompts in, completions out, under the fastest layout that fits this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.generation_values import NUMBERS
from zerofit.cli.options import rendezvous_options, run_dir_option
from zerofit.cli.parameters import CONTEXT, Number, Verb, Word
from zerofit.core.errors import UserError
from zerofit.core.plan import Origin
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.generation.generation_job import Gather
from zerofit.launching.generate.settings import SETTING_FLAGS
from zerofit.planning.inference.request import DTYPES, InferenceRequest, InferenceWorkload

if TYPE_CHECKING:
    from zerofit.generation.prompt_lines import PromptLines
    from zerofit.launching.generate.run import Run
    from zerofit.launching.nodes import Nodes
    from zerofit.planning.inference.inference_plan import InferencePlan

_POSITIVE = Number(int, least=1)
_DTYPES = {precision.value: precision for precision in Precision} | DTYPES
_FILE = click.Path(path_type=Path, dir_okay=False)
_MOST_SHOWN = 20
"""Prompts that a dry run shows. ASSUMPTION: these show what they become; thousands would bury the command."""
_NODE_FLAGS = (
    "num_nodes",
    "num_processes",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
)


@click.command(cls=Verb, context_settings=CONTEXT)
@click.option("--model", required=True, metavar="DIR", help="Folder of the model, or a cached hub id.")
@click.option("--tokenizer", metavar="DIR", help="Folder of the tokenizer; the model's, if left out.")
@click.option(
    "--prompts",
    required=True,
    metavar="FILE",
    help='.txt: a prompt a line. .jsonl: a string a line, or an object with "prompt" or "messages". - reads '
    "JSONL from standard input.",
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    help="JSONL with the completions; - is standard output, at the end.",
)
@click.option("--max-new-tokens", type=NUMBERS["max_new_tokens"], help="Tokens that a completion may have.")
@click.option(
    "--generation-config", type=_FILE, help="JSON file with settings of transformers' GenerationConfig."
)
@click.option(
    "--do-sample/--greedy", default=None, help="Draw tokens at random, or take the likeliest each time."
)
@click.option("--temperature", type=NUMBERS["temperature"], help="Above 1 is wilder; turns sampling on.")
@click.option("--top-p", type=NUMBERS["top_p"], help="Draw among the likeliest with this much in all.")
@click.option("--top-k", type=NUMBERS["top_k"], help="Draw among so many of the likeliest; 0 is all.")
@click.option(
    "--num-beams", type=NUMBERS["num_beams"], help="Completions that are searched beside each other."
)
@click.option(
    "--num-return-sequences", type=NUMBERS["num_return_sequences"], help="Completions of each prompt."
)
@click.option(
    "--repetition-penalty", type=NUMBERS["repetition_penalty"], help="Above 1 makes repeating unlikely."
)
@click.option("--seed", type=Number(int, least=0), default=0, show_default=True, help="What is drawn.")
@click.option("--chat", is_flag=True, help="Plain prompts are what a user says in a chat.")
@click.option("--chat-template", type=_FILE, help="Jinja file in place of the tokenizer's own template.")
@click.option("--batch-size", type=_POSITIVE, help="Prompts in one call on one rank.")
@click.option(
    "--dtype",
    "precision",
    type=Word("dtype", _DTYPES),
    metavar="[fp32|fp16|bf16]",
    help="Format of the weights; the model's own, if left out.",
)
@click.option(
    "--gather",
    type=Word("gather", {gather.value: gather for gather in Gather}),
    default=Gather.AUTO.value,
    show_default=True,
    help="Under ZeRO-3: bring the weights together once, or layer by layer for every token.",
)
@click.option(
    "--zero-stage",
    type=Word("zero-stage", {str(stage.value): stage for stage in ZeroStage}),
    metavar="[0|3]",
    help="0: the whole model on each rank. 3: a part of it on each.",
)
@click.option(
    "--param-offload",
    "--offload-param",
    type=Word("offload", {device.value: device for device in OffloadDevice}),
    help="Where the parts of the model rest under ZeRO-3.",
)
@click.option("--nvme-path", metavar="DIR", help="Folder on the NVMe disk, for offload to nvme.")
@click.option("--num-processes", type=_POSITIVE, help="Ranks on all nodes together; one a GPU, if left out.")
@click.option("--num-machines", "--nnodes", "num_nodes", type=_POSITIVE, help="Nodes that take part.")
@rendezvous_options
@click.option("--gpu-ids", metavar="IDS", help="GPUs of this node to use, such as 0,2.")
@click.option("--cpu", "on_cpu", is_flag=True, help="Leave GPUs alone, and generate on the CPU.")
@click.option("--trust-remote-code", is_flag=True, help="Run Python code that comes with the model.")
@run_dir_option
@click.option("--dry-run", is_flag=True, help="Print what would be written and run, and load no weights.")
def generate(run_dir: Path, dry_run: bool, **flags: Any) -> int:
    """Write a completion for each prompt, with what this machine has.

    The fastest layout that fits, by an estimate: the whole model on each GPU, ZeRO-3 over all of them, or
    ZeRO-3 with parameters in host memory or on NVMe. Each line of the results is the prompt's own line with
    "completions" added, in input order.

    Started again after a kill, the same command does only what is missing; with --out -, whose results are
    kept in the run folder until the end, --out names that file then.

    The exit code is 0 when all is done, 1 where nothing fits or a rank failed, 2 for a mistake in flags or
    files, 128 + N where signal N ended it: 130 after Ctrl-C, 141 where what reads --out - has gone.
    """
    # Only here: they bring much code, which --help does not need.
    from zerofit.launching.generate import output as outs
    from zerofit.launching.generate.run import made_folder, planned_folder
    from zerofit.launching.start import launch_command, start

    run = _run_of(flags)
    _say(f"generation: {run.settings.line(seed=run.seed)}")
    num_done = outs.count_done(run)
    if num_done:
        _say(f"{num_done} of {len(run.prompts)} prompts are done already")
    if dry_run:
        folder = planned_folder(run_dir)
        for path, text in run.files(folder).items():
            click.echo(f"# {path}\n{_begin_of(text) if path.suffix == '.jsonl' else text}")
        click.echo(launch_command(run.launch(folder), folder))
        return 0
    folder = made_folder(run, run_dir)
    launch = run.launch(folder)
    _say(f"run folder {folder.path}", f"command: {launch_command(launch, folder)}")
    with outs.stdout_is_stderr():
        verdict = start(launch, folder)
    if verdict.cause:
        _say(f"{verdict.cause}; its log and record are in {folder.path}")
        named = run.out != outs.STDOUT
        if kept := outs.kept_words(run.out_file(folder), num_prompts=len(run.prompts), is_named=named):
            _say(kept)
    elif run.out == outs.STDOUT:
        outs.copy_to_stdout(run.out_file(folder))
    return verdict.exit_code


def _run_of(flags: dict[str, Any]) -> Run:
    """Return what the command line asks for, read, checked and planned.

    Raises:
        UserError: something of it is wrong, or nothing fits.
    """
    from zerofit.launching.generate import model as models
    from zerofit.launching.generate import prompts as prompt_files
    from zerofit.launching.generate.output import check_out, drawn_batch_size
    from zerofit.launching.generate.run import Run, meeting_place
    from zerofit.launching.generate.settings import settings_said, whole_settings
    from zerofit.launching.nodes import Nodes
    from zerofit.machine.library_versions import check_libraries

    nodes = Nodes(**{name: flags[name] for name in _NODE_FLAGS})
    _check_nodes(nodes, flags)
    said = settings_said({name: flags[name] for name in SETTING_FLAGS}, file=flags["generation_config"])
    check_out(flags["out"])
    check_libraries()
    lines = prompt_files.read_prompts_file(flags["prompts"])
    model = models.find_model(flags["model"])
    place = models.find_tokenizer(flags["tokenizer"], model=model, model_text=flags["model"])
    trusts = flags["trust_remote_code"]
    facts, config = models.generating_facts(flags["model"], model, trust_remote_code=trusts)
    tokenizer = models.load_tokenizer(place, chat_template=flags["chat_template"], trust_remote_code=trusts)
    settings = whole_settings(said, folder=model, config=config, tokenizer=tokenizer)
    settings.check_batch_size(flags["batch_size"], num_prompts=len(lines.lines))
    prompts = prompt_files.tokenized(lines.lines, tokenizer, as_chat=flags["chat"])
    prompt_files.check_lengths(
        prompts,
        max_new_tokens=settings.max_new_tokens,
        positions=models.generating_positions(facts, config).less(settings.num_drafted),
        has_encoder=bool(config.is_encoder_decoder),
    )
    if lines.num_blank:
        num, are = lines.num_blank, "line is" if lines.num_blank == 1 else "lines are"
        _say(f"--prompts {flags['prompts']}: {num} blank {are} left out")
    workload = InferenceWorkload(
        num_prompts=len(prompts),
        longest_prompt=max(len(prompt.tokens) for prompt in prompts),
        max_new_tokens=settings.max_new_tokens,
        num_beams=settings.num_beams,
        num_return_sequences=settings.num_return_sequences,
    )
    # Each batch has its own seed: tokens are drawn in the batches in which the first of them were.
    drawn = drawn_batch_size(flags["out"]) if settings.samples and flags["batch_size"] is None else None
    plan = _plan(facts, workload, nodes, flags, drawn_batch_size=drawn)
    _say_unused_template(flags, lines)
    if (
        flags["gather"] is Gather.NEVER
        and plan.strategy.engine is Engine.DEEPSPEED
        and plan.topology.world_size > 1
    ):
        settings.check_in_step()
    return Run(
        model=model,
        tokenizer=place,
        trust_remote_code=trusts,
        prompts=prompts,
        settings=settings,
        plan=plan,
        gather=flags["gather"],
        seed=flags["seed"],
        out=flags["out"],
        rendezvous=meeting_place(nodes, plan.as_plan()),
    )


def _plan(
    facts: Any,
    workload: InferenceWorkload,
    nodes: Nodes,
    flags: dict[str, Any],
    *,
    drawn_batch_size: int | None,
) -> InferencePlan:
    """Plan, print the plan, and return it if it fits.

    Args:
        facts: of the model.
        workload: what is to be generated.
        nodes: of the run.
        flags: of the command line.
        drawn_batch_size: of unfinished results that were drawn at random; None where there are none.

    Raises:
        UserError: nothing fits.
    """
    from zerofit.cli.output.generate_plan import generate_plan
    from zerofit.generation.results.folder import parts_folder
    from zerofit.launching.checks import check_nvme_path
    from zerofit.machine.this_node import probe_machine
    from zerofit.machine.versions import probe_versions
    from zerofit.planning.inference.plan_inference import plan_inference
    from zerofit.planning.plan_run import DOES_NOT_FIT

    request = InferenceRequest(
        zero_stage=flags["zero_stage"],
        param_offload=flags["param_offload"],
        nvme_path=flags["nvme_path"],
        num_processes=flags["num_processes"],
        num_nodes=flags["num_nodes"],
        batch_size=flags["batch_size"] or drawn_batch_size,
        precision=flags["precision"],
        gather=flags["gather"],
        on_cpu=flags["on_cpu"],
    )
    plan = plan_inference(
        model=facts,
        machine=probe_machine(gpu_ids=nodes.gpu_indices, may_be_unreadable=flags["on_cpu"]),
        versions=probe_versions(),
        workload=workload,
        request=request,
    )
    if drawn_batch_size is not None:
        plan = _drawn_before(plan, parts_folder(Path(flags["out"])))
    click.echo(f"{generate_plan(plan)}\n", err=True)
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
    _check_fp16(plan)
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


def _say_unused_template(flags: dict[str, Any], lines: PromptLines) -> None:
    has_chats = flags["chat"] or any(not isinstance(line.prompt, str) for line in lines.lines)
    if flags["chat_template"] and not has_chats:
        _say(f"--chat-template {flags['chat_template']} changes nothing: no prompt is a chat without --chat")


def _check_fp16(plan: InferencePlan) -> None:
    strategy = plan.strategy
    if plan.topology.on_cpu and strategy.precision is Precision.FP16 and strategy.engine is Engine.DEEPSPEED:
        raise UserError(
            "generate-fp16-on-cpu",
            "DeepSpeed has no fp16 on the CPU",
            found="fp16 weights under ZeRO-3 with ranks on the CPU",
            why="DeepSpeed refuses it there (deepspeed/runtime/engine.py, _do_sanity_check)",
            fix="add --dtype bf16 or --dtype fp32",
        )


def _check_nodes(nodes: Nodes, flags: dict[str, Any]) -> None:
    """Check that several nodes, each of which plans for itself, come to the same plan and one file."""
    open_flags = {
        "zero_stage": "--zero-stage",
        "param_offload": "--param-offload",
        "batch_size": "--batch-size",
        "precision": "--dtype",
    }
    missing = [flag for name, flag in open_flags.items() if flags[name] is None]
    if (nodes.num_nodes or 1) == 1:
        return
    if flags["out"] == "-":
        raise UserError(
            "generate-nodes-need-file",
            "several nodes need a file for the results",
            found=f"--out - with --num-machines {nodes.num_nodes}",
            why="the ranks of all nodes keep their results beside it, until they are put together",
            fix="name a file on a file system that all nodes share",
        )
    if missing:
        raise UserError(
            "nodes-need-one-plan",
            "several nodes need one plan",
            found=f"--num-machines {nodes.num_nodes} without {', '.join(missing)}",
            why="each node plans by itself, and nodes whose plans differ wait for each other forever",
            fix=f"give {', '.join(missing)} on every node; `--dry-run` on one of them says what fits",
        )


def _begin_of(text: str) -> str:
    """Return prompts, or the first of them and how many more there are."""
    lines = text.splitlines(keepends=True)
    num_more = len(lines) - _MOST_SHOWN
    return text if num_more <= 0 else "".join(lines[:_MOST_SHOWN]) + f"# and {num_more} more lines\n"


def _say(*lines: str) -> None:
    for line in lines:
        click.echo(f"zerofit: {line}", err=True)
