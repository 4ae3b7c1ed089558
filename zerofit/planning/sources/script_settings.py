"""Settings of a script itself: DeepSpeed's file in its arguments, FSDP in its TrainingArguments."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

from zerofit.checking.engine import check
from zerofit.checking.inputs.fsdp import read_fsdp
from zerofit.checking.inputs.fsdp_words import words_of_script
from zerofit.checking.inputs.named_files import named_by_arguments
from zerofit.checking.inputs.situations import situations
from zerofit.checking.read_targets import read_targets
from zerofit.checking.rule import Severity
from zerofit.checking.rules import ALL_RULES
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.unreadable import MAX_BYTES
from zerofit.core.bounded_read import read_bounded, read_bounded_text
from zerofit.core.overrides import Overrides
from zerofit.machine.versions import probe_versions
from zerofit.planning.sources.config_files import ConfigFiles, read_config_files
from zerofit.scripts.target import script_path

_REFUSED_BY_PREPARE = tuple(
    rule for rule in ALL_RULES if rule.id in ("two-optimizers", "two-schedulers", "deepspeed-auto-unresolved")
)
"""Rules on sections of DeepSpeed's file that accelerate refuses once it knows the script's objects."""


def with_settings_of_script(
    files: ConfigFiles | None, target: tuple[str, ...], *, num_nodes: int
) -> ConfigFiles | None:
    """Return a launch line's files with the settings that the script's arguments and source name.

    Args:
        files: the line's; None without, if DeepSpeed's file in the script's arguments counts too.
        target: the script or module, and its arguments.
        num_nodes: of the run.

    Raises:
        UserError: transformers refuses a setting of FSDP, or FSDP2 has none like it.
    """
    named = (said.value for said in named_by_arguments(target) if Path(said.value).is_file())
    file = next(named, None) if files is None else None
    if file is not None:
        return _deepspeed_file(file)
    own = _fsdp(target, num_nodes=num_nodes) if files is None or not files.engine else None
    if files is None or own is None:
        return files or own
    overrides = replace(files.overrides, said={**files.overrides.said, **own.overrides.said})
    return replace(files, overrides=overrides, engine=own.engine, notes=(*files.notes, *own.notes))


def refused_by_prepare(
    target: tuple[str, ...], *, config_file: str | None, deepspeed_file: str | None
) -> tuple[str, ...]:
    """Return a sentence if plain accelerate would end a script's run with the files that zerofit replaces.

    Args:
        target: the script or module, and its arguments.
        config_file: of `accelerate config`.
        deepspeed_file: DeepSpeed's JSON.
    """
    if (script := script_path(target)) is None or (config_file is None and deepspeed_file is None):
        return ()
    words = ["accelerate", "launch"]
    words += [] if config_file is None else ["--config_file", config_file]
    words += [] if deepspeed_file is None else ["--use_deepspeed", "--deepspeed_config_file", deepspeed_file]
    try:
        targets = read_targets(
            [*words, script, *target[1:]],
            schemas=load_schemas(probe_versions()),
            stdin=io.BytesIO().read,
            reads_default=False,
        )
    except ExceptionGroup:
        return ()
    verdicts = [check(situation, rules=_REFUSED_BY_PREPARE) for situation in situations(targets)]
    errors = [finding for verdict in verdicts for finding in verdict.of(Severity.ERROR)]
    named = dict.fromkeys(f"{error.rule} ({error.place})" for error in errors)
    if not named:
        return ()
    return (f"plain accelerate would end this run: {', '.join(named)}; zerofit's own file replaces it",)


def _deepspeed_file(file: str) -> ConfigFiles | None:
    files = read_config_files(config_file=None, deepspeed_file=file, takes_default=False)
    if files is None:
        return None
    # These two stay the script's, which reads the file itself (training/setup/trainer_arguments.py).
    left_out = tuple(name for name in files.left_out if name not in ("optimizer", "scheduler"))
    return replace(files, left_out=left_out)


def _fsdp(target: tuple[str, ...], *, num_nodes: int) -> ConfigFiles | None:
    """Return the settings of FSDP in a script's TrainingArguments; None if they don't turn it on."""
    script = script_path(target)
    if script is None or not any("fsdp" in text.lower() for text in (_text_of(script), *target)):
        return None
    versions = probe_versions()
    stdin = io.BytesIO().read
    try:
        targets = read_targets(
            ["python", *target], schemas=load_schemas(versions), stdin=stdin, reads_default=False
        )
    except ExceptionGroup:
        return None  # the script itself refuses what can't be read
    words = words_of_script(
        situations(targets)[0],
        transformers=versions.transformers,
        num_nodes=num_nodes,
        read=lambda name: read_bounded(name, most_bytes=MAX_BYTES),
    )
    if words is None:
        return None
    settings = read_fsdp(words)
    name = script if words.uses.place is None else words.uses.place.file
    return ConfigFiles(
        name=name,
        overrides=Overrides(said=settings.said),
        buckets={},
        nodes={},
        on_cpu=False,
        engine="FSDP",
        left_out=(),
        by_script=(),
        batch={},
        notes=settings.notes,
    )


def _text_of(script: str) -> str:
    """Return the text of a script; empty if it can't be read."""
    try:
        return read_bounded_text(script, most_bytes=MAX_BYTES)
    except (OSError, UnicodeDecodeError):
        return ""
