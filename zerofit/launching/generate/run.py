"""A run of `zerofit generate`: its job, its files, its fingerprint, its rendezvous."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.deepspeed import deepspeed_config
from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine
from zerofit.generation.generation_job import GenerationJob, job_to_json
from zerofit.generation.results.parts import check_claim, kept_lines, not_writable, parts_folder
from zerofit.launching.generate.output import STDOUT, earlier_batch_size
from zerofit.launching.start import PlannedLaunch, launch_files

if TYPE_CHECKING:
    from zerofit.configs.write.command import Rendezvous
    from zerofit.generation.generation_job import Gather
    from zerofit.launching.generate.prompts import Prompt
    from zerofit.launching.generate.settings import GenerationSettings
    from zerofit.launching.run_folder import RunFolder
    from zerofit.planning.inference.problem import InferencePlan

_PROGRAM = "zerofit.generation.program"
_FINGERPRINTED = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".py", ".jinja", ".tiktoken"})
"""Extensions of the files of a model and tokenizer that affect the results."""


@dataclass(frozen=True, kw_only=True)  # without slots, since the fingerprint is cached
class GenerationRun:
    """A run: model, prompts, settings, plan and output."""

    model: Path
    tokenizer: Path
    trust_remote_code: bool
    prompts: tuple[Prompt, ...]
    settings: GenerationSettings
    plan: InferencePlan
    gather: Gather
    seed: int
    out: str
    """The file for the results, or "-"."""
    rendezvous: Rendezvous
    """Where the ranks meet."""

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that affects the results, unlike their place and the number of ranks."""
        settings = self.settings
        # Batches affect sampling, since each has its own seed.
        drawn = [self.seed, self.plan.batch_size] if settings.samples else None
        folders = [_stamp(self.model), _stamp(self.tokenizer)]
        whole = [folders, settings.whole, settings.max_new_tokens, self.plan.dtype, drawn]
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode())
        for prompt in self.prompts:
            digest.update(f"\n{json.dumps([prompt.line.fields, prompt.tokens.tolist()])}".encode())
        return digest.hexdigest()

    def count_done(self) -> int:
        """Return the number of prompts done by an earlier run of the same job; nothing is written.

        Raises:
            UserError: there are unfinished results of another job, or another run is writing them.
        """
        # Node 0 decides: copies of a model have different times.
        if self.out == STDOUT or self.rendezvous.machine_rank:
            return 0
        out = Path(self.out).absolute()
        try:
            check_claim(out, fingerprint=self.fingerprint, resume=True)
            return len(kept_lines(out))
        except UserError as error:
            drawn, batch_size = earlier_batch_size(self.out), self.plan.batch_size
            if (
                error.rule == "generate-other-parts"
                and self.settings.samples
                and drawn not in (None, batch_size)
            ):
                error.found += f"; in batches of {drawn} prompts, but {batch_size} are requested"
                error.fix += f"; if batches alone differ: --batch-size {drawn}"
            raise
        except OSError as error:
            raise not_writable(parts_folder(out), error) from None

    def files(self, folder: RunFolder) -> dict[Path, str]:
        """Return the text of each file of the run folder before the start."""
        files = {
            _prompts_file(folder): "".join(map(_prompt_line, self.prompts)),
            _job_file(folder): job_to_json(self.job(folder)),
            **launch_files(self.launch(folder), folder),
        }
        if folder.deepspeed in files:
            files[folder.deepspeed] = json.dumps(self._deepspeed_config(), indent=2) + "\n"
        return files

    def launch(self, folder: RunFolder) -> PlannedLaunch:
        """Return the launch of the ranks."""
        target = ("-m", _PROGRAM, str(_job_file(folder)))
        return PlannedLaunch(plan=self.plan.as_plan(), target=target, rendezvous=self.rendezvous)

    def job(self, folder: RunFolder) -> GenerationJob:
        """Return the job file's content."""
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
            generation=self.settings.given,
        )

    def out_file(self, folder: RunFolder) -> Path:
        """Return the file that the ranks write; it is copied to standard output at the end."""
        return folder.path / "results.jsonl" if self.out == STDOUT else Path(self.out).absolute()

    def _deepspeed_config(self) -> dict[str, Any]:
        """Return DeepSpeed's configuration, with numbers where a script would decide."""
        config = deepspeed_config(self.plan.strategy, trains=False)
        offload = config["zero_optimization"].get("offload_param", {})
        if "buffer_size" in offload:
            offload["buffer_size"] = max(offload["buffer_size"], self.plan.chosen.nvme_buffer_elements)
        return config


def _prompts_file(folder: RunFolder) -> Path:
    return folder.path / "prompts.jsonl"


def _job_file(folder: RunFolder) -> Path:
    return folder.path / "generation.json"


def _prompt_line(prompt: Prompt) -> str:
    document = {"line": prompt.line.number, "tokens": prompt.tokens.tolist(), "fields": prompt.line.fields}
    return json.dumps(document) + "\n"


def _stamp(folder: Path) -> list[Any]:
    """Return a stamp that changes with a folder's files, without reading gigabytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _FINGERPRINTED)
    return [str(folder), [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]]
