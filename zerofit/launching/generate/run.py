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
from zerofit.core.strategy import DTYPES, Engine
from zerofit.generation.generation_job import GenerationJob, job_to_json
from zerofit.generation.results import check_results, kept_results, not_writable
from zerofit.launching.generate.output import STDOUT
from zerofit.launching.start import PlannedLaunch, launch_files

if TYPE_CHECKING:
    from zerofit.configs.write.command import Rendezvous
    from zerofit.core.plan import Plan
    from zerofit.generation.generation_job import Gather
    from zerofit.generation.prompts import Tokens
    from zerofit.launching.generate.prompts import PromptLine
    from zerofit.launching.generate.settings import GenerationSettings
    from zerofit.launching.run_folder import RunFolder

_PROGRAM = "zerofit.generation.program"
_FINGERPRINTED = frozenset({".json", ".safetensors", ".bin", ".model", ".txt", ".py", ".jinja", ".tiktoken"})
"""Extensions of the files of a model and tokenizer that affect the results."""


@dataclass(frozen=True, kw_only=True)  # without slots, since the fingerprint is cached
class GenerationRun:
    """A run: model, prompts, settings, plan and output."""

    model: Path
    tokenizer: Path
    trust_remote_code: bool
    lines: tuple[PromptLine, ...]
    prompts: tuple[Tokens, ...]
    """Of each line."""
    settings: GenerationSettings
    plan: Plan
    largest_parameter: int
    """Elements of the model's largest parameter."""
    gather: Gather
    seed: int
    out: str
    """The file for the results, or "-"."""
    rendezvous: Rendezvous
    """Where the ranks meet."""

    @property
    def batch_size(self) -> int:
        """Prompts per call on one rank."""
        return self.plan.strategy.micro_batch_size or 1

    @property
    def dtype(self) -> str:
        """Format of the weights by torch's name, such as "bfloat16"."""
        return next(name for name, kind in DTYPES.items() if kind is self.plan.strategy.precision)

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that affects the results, unlike their place and the number of ranks."""
        settings = self.settings
        config = settings.call.config.to_dict().items()
        values = {name: str(value) for name, value in config if value not in (None, False)}
        # Batches affect sampling, since each has its own seed.
        drawn = [self.seed, self.batch_size] if settings.samples else None
        folders = [_stamp(self.model), _stamp(self.tokenizer)]
        whole = [folders, values, settings.max_new_tokens, self.dtype, drawn]
        digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode())
        for line, tokens in zip(self.lines, self.prompts, strict=True):
            digest.update(f"\n{json.dumps([line.fields, tokens])}".encode())
        return digest.hexdigest()

    def count_done(self) -> int:
        """Return the number of prompts done by an earlier start of the same run; nothing is written.

        Raises:
            UserError: there are unfinished results of another run, or a living one is writing them.
        """
        # Node 0 decides: copies of a model have different times.
        if self.out == STDOUT or self.rendezvous.machine_rank:
            return 0
        out = Path(self.out).absolute()
        try:
            check_results(out, run=self.fingerprint, resume=True)
            return len(kept_results(out).lines)
        except UserError as error:
            earlier = kept_results(out).batch_size
            if error.rule == "generate-other-parts" and self.settings.samples and earlier != self.batch_size:
                error.fix += f"; if only batches differ: --batch-size {earlier}"
            raise
        except OSError as error:
            raise not_writable(out, error) from None

    def files(self, folder: RunFolder) -> dict[Path, str]:
        """Return the text of each file of the run folder before the start."""
        pairs = zip(self.lines, self.prompts, strict=True)
        prompts = (json.dumps({"tokens": tokens, "fields": line.fields}) + "\n" for line, tokens in pairs)
        files = {
            _prompts_file(folder): "".join(prompts),
            _job_file(folder): job_to_json(self.job(folder)),
            **launch_files(self.launch(folder), folder),
        }
        if folder.deepspeed in files:
            files[folder.deepspeed] = json.dumps(self._deepspeed_config(), indent=2) + "\n"
        return files

    def launch(self, folder: RunFolder) -> PlannedLaunch:
        """Return the launch of the ranks."""
        target = ("-m", _PROGRAM, str(_job_file(folder)))
        return PlannedLaunch(plan=self.plan, target=target, rendezvous=self.rendezvous)

    def job(self, folder: RunFolder) -> GenerationJob:
        """Return the job file's content."""
        is_deepspeed = self.plan.strategy.engine is Engine.DEEPSPEED
        return GenerationJob(
            model=str(self.model),
            tokenizer=str(self.tokenizer),
            prompts=str(_prompts_file(folder)),
            out=str(self.out_file(folder)),
            fingerprint=self.fingerprint,
            dtype=self.dtype,
            batch_size=self.batch_size,
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
        """Return DeepSpeed's configuration, with numbers where a script would decide.

        A buffer between NVMe and GPU holds the largest shard: a larger one ends the run with "More elements
        than buffer size" (deepspeed 0.19.8, runtime/swap_tensor/partitioned_param_swapper.py:357).
        """
        config = deepspeed_config(self.plan.strategy, trains=False)
        offload = config["zero_optimization"].get("offload_param", {})
        if "buffer_size" in offload:
            shard = -(-self.largest_parameter // self.plan.topology.world_size)
            offload["buffer_size"] = max(offload["buffer_size"], shard)
        return config


def _prompts_file(folder: RunFolder) -> Path:
    return folder.path / "prompts.jsonl"


def _job_file(folder: RunFolder) -> Path:
    return folder.path / "generation.json"


def _stamp(folder: Path) -> list[Any]:
    """Return a stamp that changes with a folder's files, without reading gigabytes."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix in _FINGERPRINTED)
    return [str(folder), [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]]
