"""Rules on the file of `accelerate config`: its keys and their values."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import (
    DEEPSPEED_SECTION,
    DYNAMO_BACKEND,
    is_for_sagemaker,
    launch_count,
    launch_of,
    starts_one_process,
    uses_deepspeed,
    whole_number,
)
from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, hit_at, hit_of, ignored
from zerofit.checking.situation import known
from zerofit.configs.document import Entries, RenameKey, SetValue, say, show
from zerofit.configs.schema import ValueKind, expected, is_in_range, is_right_type
from zerofit.configs.schemas.releases import fix_for_release
from zerofit.configs.text.read import repeated_keys
from zerofit.core.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit, KeyValue
    from zerofit.configs.schema import Key, Schema


_LEAST_SIMILARITY = 0.85
"""Minimum similarity of a misspelling. ASSUMPTION: 0.85 recognizes zero_stag as zero_stage and does not
confuse two of accelerate's keys."""


_IN_DEEPSPEED_FILE = "write it in a DeepSpeed file, and name that with deepspeed_config_file"


def _in_file(
    find: Callable[[Situation, Document, Schema], Iterator[Hit]],
) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that skips files for SageMaker, and gets the file and its schema."""

    def of_situation(situation: Situation) -> Iterator[Hit]:
        file = situation.accelerate
        if file is not None and not is_for_sagemaker(file):
            schema = known(situation.schemas, "accelerate's keys").accelerate
            yield from find(situation, file, schema)

    return of_situation


@Rule(
    id="accelerate-key-repeated",
    severity=Severity.ERROR,
    summary="a key is repeated in accelerate's file",
    why="the YAML parser silently uses the last one, and the first is lost",
    fix="keep one of them",
    see="https://yaml.org/spec/1.1/#id902561",
    evidence=ignored(("zero_stage", 1)),
)
def _repeated_keys(situation: Situation) -> Iterator[Hit]:
    file = situation.accelerate
    for path, entry, values in repeated_keys(file.root) if file else ():
        if file and any(value != entry.plain for value in values):
            text = f"{'.'.join(path)} is repeated, the last value is {show(entry.plain)}"
            yield Hit(found=text, place=file.place(entry.key_span))


@Rule(
    id="accelerate-unknown-key",
    severity=Severity.ERROR,
    summary="accelerate's file has an unknown key",
    why="accelerate refuses a file with unknown keys",
    fix="remove the key, or upgrade accelerate if the key is newer",
    see=f"{ACCELERATE}/commands/config/config_args.py#L154",
    evidence=fails("had unknown keys (['num_proceses'])"),
)
@_in_file
def _unknown_keys(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    removed = {former.path[0]: former.instead for former in schema.removed}
    names = [key.name for key in schema.root.keys]
    misplaced: dict[str, list[KeyValue]] = {}
    for entry in file.root.entries:
        if schema.root.find(entry.key) is not None:
            continue
        section = _section_with(schema, entry.key)
        if section is not None:
            misplaced.setdefault(section, []).append(entry)
            continue
        instead = removed.get(entry.key) or fix_for_release(schema, entry.key)
        yield _unknown(file, (entry.key,), entry, names, instead or _file_with(situation, entry.key))
    for section, entries in misplaced.items():
        yield _misplaced(file, section, entries)


def _section_with(schema: Schema, name: str) -> str | None:
    """Return the section of accelerate's file that has a key."""
    return next((key.name for key in schema.root.keys if key.section and key.section.find(name)), None)


def _file_with(situation: Situation, name: str) -> str | None:
    """Return the fix for a key that another file or the script takes."""
    schemas = known(situation.schemas, "the keys of DeepSpeed and TrainingArguments")
    if schemas.deepspeed.root.find(name) is not None:
        return _IN_DEEPSPEED_FILE
    is_trainers = schemas.training_arguments.root.find(name) is not None
    return f"give it to the script: {name} is a field of TrainingArguments" if is_trainers else None


def _misplaced(file: Document, section: str, entries: list[KeyValue]) -> Hit:
    """Return a hit for keys at the top level that belong into a section."""
    first, is_alone = entries[0], len(entries) == 1
    names = ", ".join(entry.key for entry in entries)
    they = "it belongs" if is_alone else "they belong"
    head = f"below {section}:" if file.at(section) else f"below a line {section}:, which is missing"
    return hit_at(
        file,
        (first.key,),
        found=f"{say(file, first.key) if is_alone else names} at the top level",
        why=f"{they} into the section {section}, and accelerate refuses unknown keys at the top level",
        fix=f"indent {'it' if is_alone else 'them'} {head}",
    )


def _unknown(
    file: Document, path: tuple[str, ...], entry: KeyValue, names: Iterable[str], instead: str | None
) -> Hit:
    near = nearest(entry.key, names)
    if near is not None and file.at(*path[:-1], near) is not None:
        near = None  # the file has that key too, so another one is meant
    is_near = near is not None and SequenceMatcher(None, near, entry.key).ratio() >= _LEAST_SIMILARITY
    edits = (RenameKey(document=file.name, path=path, key=near),) if near and is_near else ()
    return hit_at(
        file,
        path,
        found=say(file, *path),
        fix=instead or (f"write {'.'.join((*path[:-1], near))}, or remove it" if near else None),
        edits=edits,
    )


@Rule(
    id="accelerate-ignored-key",
    severity=Severity.WARNING,
    summary="accelerate ignores a key of its file",
    why="accelerate only checks the top level of its file; unknown keys below have no effect",
    fix="remove the key",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(("zero_stage", 2)),
)
@_in_file
def _ignored_keys(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    # accelerate passes each of these keys to the flag of that name, in whatever section it is.
    schemas = known(situation.schemas, "the flags of accelerate launch")
    flags, deepspeed = schemas.accelerate_launch.root, schemas.deepspeed.root
    for section in schema.root.keys:
        top = file.at(section.name)
        if section.section is None or top is None or not isinstance(top.node, Entries):
            continue
        names = [key.name for key in section.section.keys if key.replaced_by is None]
        for entry in top.node.entries:
            key = section.section.find(entry.key)
            path = (section.name, entry.key)
            if key is not None and key.replaced_by is not None:
                yield _unknown(file, path, entry, [], f"write {key.replaced_by}")
            elif key is None and flags.find(entry.key) is None and entry.plain is not None:
                instead = fix_for_release(schema, *path)
                if section.name == DEEPSPEED_SECTION and deepspeed.find(entry.key) is not None:
                    instead = _IN_DEEPSPEED_FILE
                yield _unknown(file, path, entry, names, instead)


@Rule(
    id="accelerate-value-type",
    severity=Severity.ERROR,
    summary="a value in accelerate's file has the wrong type",
    why="the launcher uses values without conversion, and YAML parses no as false and 0 as a number",
    fix="give the key a value of the right type",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=fails("'bool' object has no attribute 'lower'"),
)
@_in_file
def _wrong_types(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    for path, entry, key in _known_entries(situation, file, schema):
        if not is_right_type(key, entry.plain):
            corrected = _corrected(file, entry, key)
            spelt = f'"{corrected}"' if isinstance(corrected, str) else corrected
            edit = SetValue(document=file.name, path=path, value=corrected)
            yield _invalid_value(file, path, key, spelt, () if corrected is None else (edit,))


def _corrected(file: Document, entry: KeyValue, key: Key) -> str | int | None:
    """Return the value of the right type that the user meant: "no" for no, "0" for 0, 2 for "2"."""
    value = entry.plain
    if value is False and "no" in key.choices:
        return "no"
    if ValueKind.STRING in key.kinds and isinstance(value, (bool, int)):
        text = file.text[entry.node.span.start : entry.node.span.end]
        return text if not key.choices or text.lower() in key.choices else None
    return whole_number(value) if ValueKind.INTEGER in key.kinds and isinstance(value, str) else None


def _invalid_value(
    file: Document, path: tuple[str, ...], key: Key, right: str | int | None, edits: tuple[Edit, ...] = ()
) -> Hit:
    """Return a hit for a value that accelerate refuses, with the right one if one is similar."""
    found = f"{say(file, *path)}, but accelerate expects {expected(key)}"
    name = ".".join(path)
    fix = f"give {name} {expected(key)}" if right is None else f"write {name}: {right}"
    return hit_at(file, path, found=found, fix=fix, edits=edits)


def _known_entries(
    situation: Situation, file: Document, schema: Schema
) -> Iterator[tuple[tuple[str, ...], KeyValue, Key]]:
    """Yield each effective entry, at the top and in deepspeed_config, with its key in the schema."""
    launch = launch_of(situation)
    deepspeed = uses_deepspeed(launch) if launch else None
    section = schema.find(DEEPSPEED_SECTION)
    deepspeed_keys = section.section.keys if section and section.section else ()
    # With DeepSpeed the launcher ignores it, which dynamo-ignored-with-deepspeed reports.
    is_read = deepspeed is not None and not deepspeed.value and file.value("distributed_type") != "XLA"
    for path in [
        *((key.name,) for key in schema.root.keys),
        *((DEEPSPEED_SECTION, key.name) for key in deepspeed_keys),
        *(path for path in DYNAMO_BACKEND if len(path) > 1),
    ]:
        entry, key = file.at(*path), schema.find(*path)
        if entry is not None and key is not None and (is_read or path not in DYNAMO_BACKEND):
            yield path, entry, key


@Rule(
    id="accelerate-value-choice",
    severity=Severity.ERROR,
    summary="a value in accelerate's file is not valid",
    why="accelerate or DeepSpeed refuses the value when the run starts",
    fix="give the key one of its valid values",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    evidence=fails("is not a valid DistributedType"),
)
@_in_file
def _wrong_choices(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    for path, entry, key in _known_entries(situation, file, schema):
        is_word = not isinstance(entry.plain, bool)
        if is_word and is_right_type(key, entry.plain) and not is_in_range(key, entry.plain):
            upper = str(entry.plain).upper()
            near = nearest(str(entry.plain), [str(choice) for choice in key.choices])
            yield _invalid_value(file, path, key, upper if upper in key.choices else near)


@Rule(
    id="accelerate-needs-distributed-type",
    severity=Severity.ERROR,
    summary="accelerate's file needs distributed_type",
    why="accelerate refuses a file that does not say how the run is distributed",
    fix="write distributed_type: DEEPSPEED, or another type",
    see=f"{ACCELERATE}/commands/config/config_args.py#L110",
    evidence=fails("A `distributed_type` must be specified"),
)
@_in_file
def _no_distributed_type(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    if file.at("distributed_type") is None:
        yield Hit(found="no distributed_type", place=file.place(file.root.span))


@Rule(
    id="accelerate-needs-num-processes",
    severity=Severity.ERROR,
    summary="accelerate needs num_processes in its file or on the command line",
    why="with a file accelerate does not count the GPUs",
    fix="write num_processes: the GPUs of all machines together",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=fails("You need to manually pass in `--num_processes`"),
)
@_in_file
def _no_num_processes(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    if file.value("distributed_type") in (None, "NO"):
        return
    entry = file.at("num_processes")
    if entry is not None and entry.plain != -1:
        return
    known(situation.command, "the command line, which may have --num_processes")
    launch = launch_of(situation)
    if launch is not None and launch.command is not None and launch.command.find("num_processes") is None:
        yield Hit(
            found="num_processes=-1" if entry else "no num_processes and no --num_processes",
            place=file.place(entry.key_span if entry else file.root.span),
        )


@Rule(
    id="distributed-type-starts-one-process",
    severity=Severity.WARNING,
    summary="with distributed_type: NO accelerate starts one process",
    why="the number of processes has no effect: the script trains on one GPU, and each step has the samples "
    "of one rank",
    fix="write distributed_type: MULTI_GPU, or another type with ranks, or num_processes: 1",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(not_reproduced="the harness sets the number of ranks itself"),
)
@_in_file
def _one_process(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    launch = launch_of(situation)
    kind = file.said("distributed_type")
    if launch is None or kind is None or not starts_one_process(launch):
        return
    ranks = launch_count(launch, "num_processes")
    if ranks is not None and ranks.value > 1:
        yield hit_of(ranks, f" with {kind.text}")


@Rule(
    id="accelerate-key-needs-flag",
    severity=Severity.WARNING,
    summary="accelerate only reads this setting from the command line",
    why="the flag has its own default, so the launcher never uses the file's value",
    fix="set it on the command line",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(not_reproduced="the launcher's state is not observed"),
)
@_in_file
def _keys_without_effect(situation: Situation, file: Document, schema: Schema) -> Iterator[Hit]:
    for key, default in (("rdzv_backend", "static"), ("enable_cpu_affinity", False)):
        entry = file.at(key)
        if entry is None or entry.plain in (default, None):
            continue
        flag = f"--{key} {entry.plain}" if isinstance(entry.plain, str) else f"--{key}"
        if situation.command is None or situation.command.find(key) is None:
            yield hit_at(file, (key,), found=say(file, key), fix=f"set it on the command line: {flag}")


REFUSED_BY_ACCELERATE = (_unknown_keys, _wrong_types, _wrong_choices)
"""Rules on files that accelerate refuses, which plan and launch refuse too."""
RULES = declared(vars())
