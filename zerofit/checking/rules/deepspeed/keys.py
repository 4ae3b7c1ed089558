"""Rules on the keys of ds_config.json: unknown, misplaced, missing, repeated, removed and deprecated ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import (
    COSTS,
    DEEPSPEED,
    DEEPSPEED_DOCS,
    Hit,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
    ignored,
)
from zerofit.checking.rules.deepspeed.readers import is_unseen_offload
from zerofit.checking.situation import entries_of, is_read_by_others, known
from zerofit.configs.document import Entries, RemoveKey, RenameKey, say, show
from zerofit.configs.schema import OnUnknown, is_right_type, params_section
from zerofit.configs.schemas.releases import fix_for_release
from zerofit.configs.text.read import repeated_keys
from zerofit.core.command import Route
from zerofit.core.setting import Confidence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit
    from zerofit.configs.schema import FoundKey, Key, Schema


_LEAST_SIMILARITY = 0.8
"""ASSUMPTION: minimum similarity of a misspelt key; "optimizer" and "optimiser" have 0.89."""
_LEAST_WORD_SIMILARITY = 0.3
"""ASSUMPTION: minimum similarity of each of its words: zero3 and stage3 have 0.36, model and data 0.22."""
_CERTAIN_SIMILARITY = 0.9
"""ASSUMPTION: minimum similarity at which, with a single candidate, nothing else can be meant."""
_DISTINCTIVE_KEYS = ("stage", "zenflow", "hysteresis")
"""Keys without an underscore that only one section has and that mean nothing else."""
_OTHER_NAMES = {"learning_rate": "lr", "epsilon": "eps"}
"""Other libraries' names for DeepSpeed's keys, too different for a misspelling."""
_SECTIONS_OF_DISTINCTIVE_KEYS = (
    "zero_optimization",
    "fp16",
    "activation_checkpointing",
    "aio",
    "optimizer",
    "scheduler",
)
"""Sections whose keys with an underscore mean nothing else; "seed" or "debug" are too general."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySuggestion:
    """Valid keys similar to an unknown one."""

    spellings: tuple[str, ...] = ()
    """Keys of the same section, the most similar first."""
    is_sure: bool = False
    """True if it can only be the first one."""
    elsewhere: tuple[tuple[str, ...], ...] = ()
    """Paths of keys with the same name in other sections."""

    of_release: str | None = None
    """The fix if another release has this key."""

    @property
    def fix(self) -> str | None:
        """The fix; None if no key is similar."""
        if self.of_release is not None:
            return self.of_release
        if self.elsewhere:
            return f"move it {_into(path[:-1] for path in self.elsewhere)}"
        return f"write {' or '.join(self.spellings)}" if self.spellings else None


def _into(sections: Iterable[tuple[str, ...]]) -> str:
    """Return where a key belongs, behind "move it": "into fp16 or into bf16"."""
    return " or ".join(f"into {'.'.join(section)}" if section else "to the top level" for section in sections)


_SOURCE = f"{DEEPSPEED}/runtime"
_REMOVED_ISSUE = "https://github.com/deepspeedai/DeepSpeed/issues/8489"
_MAX_SECTIONS = 2
"""ASSUMPTION: maximum sections named for a key with a general name; "enabled" is in twenty."""
_MAX_NAMED = 5
"""Maximum unknown keys listed per section; a file with more is hardly for DeepSpeed."""
_WHY_OF_PARAMS = "params are arguments of a constructor, which raises an error for an unknown one"
_REMOVE_DISABLED = "remove it: it is off anyway"


@Rule(
    id="deepspeed-key-misspelt",
    severity=Severity.ERROR,
    summary="DeepSpeed ignores an unknown key that looks like a misspelling",
    why="these sections are read key by key and unknown keys are ignored, so the default applies",
    fix="write the intended key, in its section",
    see=f"{_SOURCE}/config.py",
    evidence=ignored(("zero_stage", 0)),
)
def _misspelt(situation: Situation) -> Iterator[Hit]:
    for document, found, suggestion in _unknown(situation, OnUnknown.IGNORES):
        if suggestion.fix is not None and suggestion.of_release is None and not _is_note(found):
            yield _unknown_hit(document, found, suggestion)


def suggest_keys(found: FoundKey, schema: Schema) -> KeySuggestion:
    """Return the valid keys that an unknown one may be a misspelling of."""
    name = found.path[-1]
    other = _OTHER_NAMES.get(name)
    if other is not None and found.section.find(other) is not None:
        return KeySuggestion(spellings=(other,), is_sure=True)
    if places := _places(found, schema):
        return KeySuggestion(elsewhere=places)
    spellings = {
        key.name for key in found.section.keys if key.replaced_by is None and _may_be_for(key, found.value)
    }
    similarity = {spelling: _similarity(name, spelling) for spelling in spellings}
    best = max(similarity.values(), default=0.0)
    # A plural or prefix makes two existing keys similar; the less similar one is then not listed.
    least = max(_LEAST_SIMILARITY, best - 0.05)
    near = [spelling for spelling in similarity if similarity[spelling] >= least]
    near = sorted(near, key=lambda spelling: (-similarity[spelling], spelling))[:3]
    return KeySuggestion(spellings=tuple(near), is_sure=len(near) == 1 and best >= _CERTAIN_SIMILARITY)


def _may_be_for(key: Key, value: Any) -> bool:
    """Return True if the value's kind, section or scalar, is the key's."""
    return isinstance(value, dict) is (key.section is not None) or is_right_type(key, value)


def _similarity(text: str, other: str) -> float:
    matcher = SequenceMatcher(a=_normalized(text), b=_normalized(other), autojunk=False)
    # The quick ratios are upper bounds, without which files with thousands of unknown keys take minutes.
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio)
    if any(bound() < _LEAST_SIMILARITY for bound in bounds):
        return 0.0
    words, others = _normalized(text).split("_"), _normalized(other).split("_")
    pairs = zip(words, others, strict=True) if len(words) == len(others) else ()
    means_another = any(SequenceMatcher(None, *pair).ratio() < _LEAST_WORD_SIMILARITY for pair in pairs)
    return 0.0 if means_another else matcher.ratio()


def _normalized(name: str) -> str:
    return name.lower().replace("-", "_").replace(" ", "_")


def _places(found: FoundKey, schema: Schema) -> tuple[tuple[str, ...], ...]:
    """Return where a key of the same name belongs, if the name is specific enough."""
    name = found.path[-1]
    if "_" not in name and name not in (*_SECTIONS_OF_DISTINCTIVE_KEYS, *_DISTINCTIVE_KEYS):
        return ()
    return tuple(
        path
        for path, key in schema.walk()
        if (name == key.name or name in key.aliases)
        and (len(path) == 1 or path[0] in _SECTIONS_OF_DISTINCTIVE_KEYS)
        and _may_be_for(key, found.value)
    )


def _unknown(
    situation: Situation, on_unknown: OnUnknown
) -> Iterator[tuple[Document, FoundKey, KeySuggestion]]:
    removed = None
    for document, found in entries_of(situation):
        if found.key is None and found.section.on_unknown is on_unknown:
            schema = known(situation.schemas, "DeepSpeed's keys").deepspeed
            removed = removed or {gone.path for gone in schema.removed}
            if found.path not in removed:
                of_release = fix_for_release(schema, *found.path)
                suggestion = (
                    suggest_keys(found, schema)
                    if of_release is None
                    else KeySuggestion(of_release=of_release)
                )
                yield document, found, suggestion


def _unknown_hit(document: Document, found: FoundKey, suggestion: KeySuggestion) -> Hit:
    edits: tuple[Edit, ...] = ()
    meant = [(*found.path[:-1], spelling) for spelling in suggestion.spellings] + [*suggestion.elsewhere]
    beside = [path for path in meant if document.at(*path) is not None]
    fix = suggestion.fix
    if beside and len(beside) == len(meant):
        fix = f"remove it: {' and '.join('.'.join(path) for path in beside)} is set too"
        if document.value(*beside[0]) == found.value and len(beside) == 1:
            edits = (RemoveKey(document=document.name, path=found.path),)
    elif beside:
        rest = replace(
            suggestion,
            spellings=tuple(path[-1] for path in meant if path not in beside and not suggestion.elsewhere),
            elsewhere=tuple(path for path in suggestion.elsewhere if path not in beside),
        )
        fix = f"{rest.fix}, or remove it"
    elif suggestion.is_sure:
        edits = (RenameKey(document=document.name, path=found.path, key=suggestion.spellings[0]),)
    why = _WHY_OF_PARAMS if found.path[-2:-1] == ("params",) else None
    return hit_at(document, found.path, fix=fix, why=why, edits=edits)


def _is_note(found: FoundKey) -> bool:
    """Return True if a key is a comment for people."""
    name = found.path[-1].lower()
    return not name[:1].isalpha() or "comment" in name or name in ("note", "notes", "description", "doc")


@Rule(
    id="deepspeed-key-ignored",
    severity=Severity.WARNING,
    summary="DeepSpeed ignores an unknown key",
    why="these sections are read key by key and unknown keys are ignored, so the key has no effect",
    fix="remove it, or look up the intended key",
    see=DEEPSPEED_DOCS,
    evidence=ignored(("engine._config.communication_data_type", None)),
)
def _ignored(situation: Situation) -> Iterator[Hit]:
    sections: dict[tuple[tuple[str, ...], str], list[FoundKey]] = {}
    for document, found, suggestion in _unknown(situation, OnUnknown.IGNORES):
        if suggestion.of_release is not None:
            yield _unknown_hit(document, found, suggestion)
        elif suggestion.fix is None and not _is_note(found):
            schema = known(situation.schemas, "DeepSpeed's keys").deepspeed
            places = _into(_sections_with(found, schema))
            sections.setdefault((found.path[:-1], places), []).append(found)
    for (_, places), founds in sections.items():
        document = known(situation.deepspeed, "the DeepSpeed configuration")
        names = [".".join(found.path) for found in founds]
        more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
        yield Hit(
            found=say(document, *founds[0].path) if len(names) == 1 else ", ".join(names[:_MAX_NAMED]) + more,
            place=document.place(founds[0].entry.key_span),
            fix=f"move {'it' if len(names) == 1 else 'them'} {places}" if places else None,
        )


def _sections_with(found: FoundKey, schema: Schema) -> list[tuple[str, ...]]:
    """Return the sections that have a key of this name, too general a name for a misspelling.

    Empty if there are too many to tell.
    """
    name = found.path[-1]
    sections = [
        path[:-1]
        for path, key in schema.walk()
        if name == path[-1]
        and _may_be_for(key, found.value)
        and ("_" in name or path[0] in _SECTIONS_OF_DISTINCTIVE_KEYS)
    ]
    for section in schema.root.keys:
        params = section.section.params_of if section.section else ()
        if any(of_type.find(name) is not None for _, of_type in params):
            sections.append((section.name, "params"))
    return sections if len(sections) <= _MAX_SECTIONS else []


@Rule(
    id="deepspeed-key-rejected",
    severity=Severity.ERROR,
    summary="DeepSpeed refuses an unknown key in this section",
    why="these sections are validated, and an unknown key ends the run",
    fix="remove it, or look up the intended key",
    see=DEEPSPEED_DOCS,
    evidence=fails("Extra inputs are not permitted"),
)
def _rejected(situation: Situation) -> Iterator[Hit]:
    for document, found, suggestion in _unknown(situation, OnUnknown.REJECTS):
        hit = _unknown_hit(document, found, suggestion)
        schema = known(situation.schemas, "DeepSpeed's keys").deepspeed
        if hit.fix is None and (places := _into(_sections_with(found, schema))):
            hit = replace(hit, fix=f"move it {places}")
        yield hit


@Rule(
    id="deepspeed-params-incomplete",
    severity=Severity.ERROR,
    summary="a scheduler lacks a required argument",
    why='params are arguments of a constructor; accelerate and Trainer only replace "auto"',
    fix="set it",
    see=f"{_SOURCE}/lr_schedules.py",
    evidence=fails("missing 1 required positional argument: 'total_num_steps'"),
)
def _incomplete(situation: Situation) -> Iterator[Hit]:
    # Scripts that pass their configuration to DeepSpeed themselves often compute the steps first.
    confidence = Confidence.LIKELY if situation.route in (None, Route.NATIVE) else Confidence.CERTAIN
    for document, found in entries_of(situation):
        missing = [".".join((*found.path, *below)) for below in _missing_params(found)]
        if missing:
            names = " and ".join(missing)
            yield hit_at(
                document,
                found.path,
                found=f"{say(document, *found.path, 'type')} without {names}",
                fix=f"set {names}",
                confidence=confidence,
            )


def _missing_params(found: FoundKey) -> Iterator[tuple[str, ...]]:
    """Yield the missing params of a section with a type, as paths below it."""
    section = found.key.section if found.key else None
    entries = found.entry.node
    if section is None or not section.params_of or not isinstance(entries, Entries):
        return
    params = section.find("params")
    given = found.value.get("params", {})
    if not isinstance(found.value.get("type"), str) or not isinstance(given, dict):
        return
    taken = params_section(entries, section)
    needed = [key.name for key in taken.keys if key.required] if taken else []
    # An unknown argument is refused first, and may be the missing one misspelt.
    if taken is None or all(taken.find(name) for name in given):
        yield from (("params", name) for name in needed if name not in given)
    if params is not None and params.required and not needed and "params" not in found.value:
        yield ("params",)


@Rule(
    id="deepspeed-key-removed",
    severity=Severity.ERROR,
    summary="DeepSpeed refuses a key of a removed feature",
    why="the feature was removed, and the key ends the run even if it disables the feature",
    fix="remove it",
    see=_REMOVED_ISSUE,
    evidence=fails("has been removed"),
)
def _removed(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    if situation.deepspeed is None:
        return
    for gone in known(situation.schemas, "DeepSpeed's keys").deepspeed.removed:
        entry = document.at(*gone.path)
        if entry is None:
            continue
        # mics_shard_size was off at -1.
        is_off = entry.plain in (False, None, 0, -1, {}) or (
            isinstance(entry.plain, dict) and entry.plain.get("enabled") is False
        )
        fix = _REMOVE_DISABLED if is_off else gone.instead
        edits = (RemoveKey(document=document.name, path=gone.path),) if is_off else ()
        yield hit_at(document, gone.path, fix=fix, edits=edits)


@Rule(
    id="deepspeed-key-deprecated",
    severity=Severity.ADVICE,
    summary="DeepSpeed has replaced this key",
    why="the old key is deprecated, and will be removed",
    fix="use the newer key",
    see=f"{_SOURCE}/zero/config.py",
    evidence=COSTS,
)
def _deprecated(situation: Situation) -> Iterator[Hit]:
    for document, found in entries_of(situation):
        if found.key is None or found.key.replaced_by is None or found.value is None:
            continue
        if not _successors(document, found) and not is_unseen_offload(situation, found):
            yield _deprecated_hit(document, found, found.key.replaced_by)


def _deprecated_hit(document: Document, found: FoundKey, replaced_by: str) -> Hit:
    successor = found.section.find(replaced_by)
    fix = f"use {replaced_by}"
    edits: tuple[Edit, ...] = ()
    if successor is not None and successor.section is None:
        fix = f"write {successor.name}"
        edits = (RenameKey(document=document.name, path=found.path, key=successor.name),)
    elif found.value is False:
        fix = fix if successor is None else _REMOVE_DISABLED
        edits = (RemoveKey(document=document.name, path=found.path),)
    elif successor is not None:
        fix = f'write "{successor.name}": {{"device": "cpu"}}'
    return hit_at(document, found.path, fix=fix, edits=edits)


def _successors(document: Document, found: FoundKey) -> list[str]:
    """Return the keys beside a deprecated one that replace it."""
    replaced_by = found.key.replaced_by if found.key else None
    successor = found.section.find(replaced_by) if replaced_by else None
    if successor is None:
        return []
    names = (successor.name, *successor.aliases)
    return [name for name in names if document.at(*found.path[:-1], name)]


@Rule(
    id="deepspeed-key-under-two-names",
    severity=Severity.ERROR,
    summary="DeepSpeed refuses a setting under two names",
    why="one name is deprecated or an alias of the other, and both can contradict each other",
    fix="keep one of them",
    see=f"{_SOURCE}/config_utils.py",
    evidence=fails("Cannot provide deprecated parameter"),
)
def _two_names(situation: Situation) -> Iterator[Hit]:
    for document, found in entries_of(situation):
        if found.key is None or found.section.on_unknown is not OnUnknown.REJECTS:
            continue
        others = _successors(document, found)
        if found.path[-1] in found.key.aliases and document.at(*found.path[:-1], found.key.name):
            others.append(found.key.name)
        if others and found.value is not None:
            other = say(document, *found.path[:-1], others[0])
            yield hit_at(document, found.path, other, fix=f"remove {found.path[-1]}")


@Rule(
    id="deepspeed-key-repeated",
    severity=Severity.ERROR,
    summary="a key is repeated in a section",
    why="DeepSpeed refuses such a file, and accelerate and Trainer silently use the last one",
    fix="keep one of them",
    see=f"{_SOURCE}/config_utils.py",
    evidence=fails("Duplicate keys in DeepSpeed config"),
)
def _repeated(situation: Situation) -> Iterator[Hit]:
    document = situation.file
    for path, entry, values in repeated_keys(document.root):
        is_harmless = all(value == values[0] for value in values)
        if is_harmless and is_read_by_others(situation):
            continue
        shown = " and ".join(map(show, values))
        yield Hit(found=f"{'.'.join(path)} twice: {shown}", place=document.place(entry.key_span))


RULES = declared(vars())
