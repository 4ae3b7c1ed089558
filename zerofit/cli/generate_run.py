"""A run of `zerofit generate`: its job, its files, its fingerprint, where its results go."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.cli.write_files import not_writable
from zerofit.errors import UserError
from zerofit.generation.part_errors import out_exists
from zerofit.generation.part_folder import claim, part_files, parts_folder
from zerofit.generation.part_lines import PartLines
from zerofit.generation_job import GenerationJob, job_to_json
from zerofit.launcher.launch import Launch, launch_files
from zerofit.launcher.nodes import find_rendezvous
from zerofit.launcher.run_folder import RunFolder, new_run_folder, run_folder, write_file
from zerofit.render.command import first_gpu, is_on_one_of_many_gpus
from zerofit.render.deepspeed import deepspeed_config
from zerofit.strategy import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.cli.generate_prompts import Prompt
    from zerofit.cli.generate_settings import Settings
    from zerofit.generated import Gather
    from zerofit.inference.planned import InferencePlan
    from zerofit.launcher.nodes import Nodes
    from zerofit.plan import Plan
    from zerofit.render.command import Rendezvous

STDOUT = "-"
_PROGRAM = "zerofit.generation.program"
_NAME = "generate"
"""What run folders of this verb are named after."""
_DECIDING = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".py", ".jinja", ".tiktoken"})
"""Endings of the files of a model and a tokenizer that decide about what is generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is to be generated, with what, and where to."""

    model: Path
    tokenizer: Path
    trust_remote_code: bool
    prompts: tuple[Prompt, ...]
    settings: Settings
    plan: InferencePlan
    gather: Gather
    seed: int
    out: str
    """The file for the results, or "-"."""
    rendezvous: Rendezvous
    """Where the ranks meet."""

    @property
    def fingerprint(self) -> str:
        """Of all that decides about the results; where, and on how many ranks, they are made does not."""
        settings = self.settings
        # Batches decide about what is drawn: each has its own seed.
        drawn = [self.seed, self.plan.batch_size] if settings.samples else None
        prompts = [[prompt.line.fields, prompt.tokens] for prompt in self.prompts]
        folders = [_stamp(self.model), _stamp(self.tokenizer)]
        whole = [folders, prompts, settings.whole, settings.max_new_tokens, self.plan.dtype, drawn]
        return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()

    def files(self, folder: RunFolder) -> dict[Path, str]:
        """Return the text of each file that the run folder gets before the start."""
        launch = self.launch(folder)
        files = {
            _prompts_file(folder): "".join(map(_prompt_line, self.prompts)),
            _job_file(folder): job_to_json(self.job(folder)),
        }
        files |= launch_files(launch, folder)
        if folder.deepspeed in files:
            files[folder.deepspeed] = json.dumps(self._deepspeed_config(), indent=2) + "\n"
        return files

    def launch(self, folder: RunFolder) -> Launch:
        """Return what starts the ranks."""
        target = ("-m", _PROGRAM, str(_job_file(folder)))
        return Launch(plan=self.plan.as_plan(), target=target, rendezvous=self.rendezvous)

    def job(self, folder: RunFolder) -> GenerationJob:
        """Return what the ranks are told."""
        is_deepspeed = self.plan.strategy.engine is Engine.DEEPSPEED
        return GenerationJob(
            model=str(self.model),
            tokenizer=str(self.tokenizer),
            prompts=str(_prompts_file(folder)),
            out=str(self.out_file(folder)),
            fingerprint=self.fingerprint,
            dtype=self.plan.dtype,
            batch_size=self.plan.batch_size,
            max_new_tokens=self.settings.max_new_tokens,
            gather=self.gather,
            seed=self.seed,
            trust_remote_code=self.trust_remote_code,
            deepspeed=str(folder.deepspeed) if is_deepspeed else None,
            generation=self.settings.said,
        )

    def out_file(self, folder: RunFolder) -> Path:
        """Return the file that the ranks write: standard output gets a copy of it at the end."""
        return folder.path / "results.jsonl" if self.out == STDOUT else Path(self.out).absolute()

    def _deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with numbers where a script would decide."""
        config = deepspeed_config(self.plan.strategy, trains=False)
        offload = config["zero_optimization"].get("offload_param", {})
        if "buffer_size" in offload:
            offload["buffer_size"] = max(offload["buffer_size"], self.plan.chosen.nvme_buffer_elements)
        return config


def planned_folder(runs: Path) -> RunFolder:
    """Return the folder that a run would get now; nothing is written."""
    return run_folder(runs, target=_NAME, at=datetime.now())


def made_folder(run: Run, runs: Path) -> RunFolder:
    """Make the folder of a run and write its files.

    Raises:
        UserError: the folder can't be written.
    """
    folder = new_run_folder(runs, target=_NAME, at=datetime.now())
    for path, text in run.files(folder).items():
        write_file(path, text, executable=path == folder.command)
    return folder


def meeting_place(nodes: Nodes, plan: Plan) -> Rendezvous:
    """Return where the ranks of a plan meet, and on which of this node's GPUs they are.

    Raises:
        UserError: on several nodes, something that each must know was not said.
    """
    rendezvous = find_rendezvous(nodes, plan.topology)
    if not is_on_one_of_many_gpus(plan):
        return rendezvous
    return replace(rendezvous, gpu_ids=first_gpu(nodes.gpu_ids, os.environ.get("CUDA_VISIBLE_DEVICES")))


def check_out(out: str, *, flag: str = "--out FILE") -> None:
    """Check, before anything slow is done, that results can be written where they should go.

    Args:
        out: the file, or "-".
        flag: what names it.

    Raises:
        UserError: something is there, or the folder is not, or can't be written.
    """
    if out == STDOUT:
        return
    path = Path(out)
    if os.path.lexists(path):
        raise out_exists(path)
    if not path.parent.is_dir():
        raise UserError(
            "generate-out-folder-missing",
            "the folder for the results is not there",
            found=f"--out {out}: no folder {path.parent}",
            why="zerofit makes no folders for results: a slip of the keys would hide them",
            fix=f"mkdir -p {path.parent}, or name a file in another folder",
        )
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise not_writable(f"Permission denied: {path.parent}", flag=flag)


def count_done(run: Run) -> int:
    """Return how many prompts an earlier run of the same kind has done, and take over its results.

    Raises:
        UserError: unfinished results of another kind are there, or another run is writing them.
    """
    if run.out == STDOUT:
        return 0
    out = Path(run.out).absolute()
    # The ranks claim it anew; here it is done because a refusal should come before a model is loaded.
    try:
        os.close(claim(out, fingerprint=run.fingerprint, resume=True))
    except UserError as error:
        raise _with_batch_size(error) if run.settings.samples else error from None
    return len(PartLines(list(part_files(parts_folder(out)).values())))


def _with_batch_size(error: UserError) -> UserError:
    """Return the same of results for which tokens are drawn: each batch has its own seed."""
    if error.rule != "generate-other-parts":
        return error
    return UserError(
        error.rule,
        error.summary,
        found=error.found,
        why=error.why,
        fix=f"{error.fix}; if batches alone differ: --batch-size as in generation.json of that run's folder",
    )


@contextmanager
def stdout_is_stderr() -> Iterator[None]:
    """Let what the ranks and their libraries print go to standard error: standard output is for results."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(own, 1)
        os.close(own)


def copy_to_stdout(path: Path) -> None:
    """Write a file's content to standard output."""
    with path.open("rb") as file:
        for chunk in file:
            sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def _prompts_file(folder: RunFolder) -> Path:
    return folder.path / "prompts.jsonl"


def _job_file(folder: RunFolder) -> Path:
    return folder.path / "generation.json"


def _prompt_line(prompt: Prompt) -> str:
    document = {"line": prompt.line.number, "tokens": prompt.tokens, "fields": prompt.line.fields}
    return json.dumps(document) + "\n"


def _stamp(folder: Path) -> list[Any]:
    """Return what tells whether a folder's files are still the same, without reading gigabytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _DECIDING)
    return [str(folder), [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]]
