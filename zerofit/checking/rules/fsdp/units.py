"""Rules on the units that FSDP gathers one at a time: the wrap policy and the classes that it names."""

from __future__ import annotations

import re
from dataclasses import replace
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import whole_number
from zerofit.checking.inputs.fsdp_run import FsdpSource
from zerofit.checking.inputs.model_family import model_families
from zerofit.checking.rule import ACCELERATE, Effect, Reproduction, Rule, Severity, declared, fails, hit_of
from zerofit.checking.rules.fsdp.settings import under_fsdp
from zerofit.core.command import is_literal
from zerofit.core.errors import nearest
from zerofit.core.setting import Confidence, Said
from zerofit.core.upstream.model_code import block_classes, families_with_class, is_in_code_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.fsdp_run import FsdpRun
    from zerofit.checking.rule import Hit
    from zerofit.checking.situation import Situation

_PLUGIN = f"{ACCELERATE}/utils/dataclasses.py"
_PREPARE = f"{ACCELERATE}/utils/fsdp_utils.py"
_POLICY, _SIZE, _CLASSES = "auto_wrap_policy", "min_num_params", "transformer_layer_cls_to_wrap"
_RECOMPUTES = "activation_checkpointing"
_BY_CLASS, _BY_SIZE, _NONE = "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
_WHOLE = re.compile(r"\s*[+-]?[0-9_]+\s*")
_CLASS = re.compile(r"[A-Za-z_]\w*")
_LEAST_SIMILARITY = 0.85
"""Of a misspelt class. ASSUMPTION: 0.85 recognizes LlamaDecodeLayer, and no two families' blocks as one."""


def _policy(fsdp: FsdpRun) -> str | None:
    """Return the wrap policy, also by default; None if unknown."""
    said = fsdp.find(_POLICY)
    if said is not None:
        return str(said.value).upper()
    return str(fsdp.default(_POLICY)) if fsdp.is_complete else None


def _is_whole(said: Said[object]) -> bool:
    """Return True if int() of a value's text works, which is how accelerate reads it."""
    return not isinstance(said.value, float) and _WHOLE.fullmatch(str(said.value)) is not None


@Rule(
    id="fsdp-wraps-no-block",
    severity=Severity.WARNING,
    summary="FSDP gathers the whole model at once",
    why="without a wrap policy the blocks are one unit, whose weights every rank has in full from forward to "
    "backward; only the optimizer's states stay sharded",
    fix="write auto_wrap_policy: TRANSFORMER_BASED_WRAP, which shards each block",
    see="https://huggingface.co/docs/accelerate/usage_guides/fsdp",
    evidence=Reproduction(outcome=Effect.COSTS, observed=(("units", 4),)),
)
@under_fsdp()
def _no_units(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    policy, said, size = _policy(fsdp), fsdp.find(_POLICY), fsdp.find(_SIZE)
    if fsdp.is_on(_RECOMPUTES):
        return  # fsdp-checkpointing-needs-blocks
    if policy == _NONE:
        if said is not None:
            yield hit_of(said)
        else:
            yield hit_of(fsdp.uses, " with no auto_wrap_policy")
    elif policy == _BY_SIZE and said is not None and _takes_no_size(fsdp, size):
        yield hit_of(said, f" with {size.text if size else 'no min_num_params'}")


def _takes_no_size(fsdp: FsdpRun, size: Said[object] | None) -> bool:
    """Return True if the least size of a unit is 0, which accelerate takes for none."""
    if size is not None:
        return whole_number(size.value) == 0
    return fsdp.source is not FsdpSource.LAUNCH and fsdp.is_complete  # the launcher's default is 1e8


@Rule(
    id="fsdp-checkpointing-needs-blocks",
    severity=Severity.ERROR,
    summary="FSDP's activation_checkpointing needs a wrap policy",
    why="the policy picks the blocks that are recomputed, and without one prepare() calls None",
    fix="write auto_wrap_policy: TRANSFORMER_BASED_WRAP, or leave activation_checkpointing out",
    see="https://github.com/huggingface/accelerate/issues/3822",
    evidence=fails("'NoneType' object is not callable"),
)
@under_fsdp(version=2)
def _recomputes_no_block(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    recomputes, said, size = fsdp.find(_RECOMPUTES), fsdp.find(_POLICY), fsdp.find(_SIZE)
    if recomputes is None or not fsdp.is_on(_RECOMPUTES):
        return
    policy = _policy(fsdp)
    if policy == _NONE:
        yield hit_of(said or recomputes, f" with {recomputes.text if said else 'no auto_wrap_policy'}")
    elif policy == _BY_SIZE and said is not None and _takes_no_size(fsdp, size):
        yield hit_of(said, f" with {size.text if size else 'no min_num_params'} and {recomputes.text}")


@Rule(
    id="fsdp2-shards-no-module-lists",
    severity=Severity.ERROR,
    summary="SIZE_BASED_WRAP fails under FSDP 2 for a model with a ModuleList",
    why="the policy picks the list of blocks, which is large enough, and fully_shard() takes no containers",
    fix="write TRANSFORMER_BASED_WRAP",
    see=_PREPARE,
    evidence=fails("fully_shard does not support containers that do not implement forward: ModuleList"),
)
@under_fsdp(version=2)
def _wraps_lists(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said, size = fsdp.find(_POLICY), fsdp.find(_SIZE)
    if said is None or _policy(fsdp) != _BY_SIZE or _takes_no_size(fsdp, size):
        return
    if size is None or _is_whole(size):
        yield hit_of(replace(said, confidence=Confidence.LIKELY), " with FSDP 2")


@Rule(
    id="fsdp-min-num-params-is-whole",
    severity=Severity.ERROR,
    summary="min_num_params must be written as a whole number",
    why="accelerate passes its text to int(), which takes neither 1e8, a text in YAML, nor 1.0e+8",
    fix="write all its digits: 100000000",
    see=_PLUGIN,
    evidence=fails("invalid literal for int() with base 10: '1e8'"),
)
@under_fsdp(FsdpSource.LAUNCH)
def _open_size(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    size = fsdp.find(_SIZE)
    is_read = _policy(fsdp) == _BY_SIZE and size is not None and size.place is not None
    if is_read and size is not None and is_literal(str(size.value)) and not _is_whole(size):
        yield hit_of(size)


@Rule(
    id="fsdp-wrap-classes-are-one-text",
    severity=Severity.ERROR,
    summary="classes to wrap are one text, separated by commas without spaces",
    why="accelerate splits the text at its commas and looks for each part as it is, so that a space or "
    "the brackets of a list become part of a name",
    fix="write the names with commas alone between them",
    see=_PLUGIN,
    evidence=fails("Could not find the transformer layer class ['LlamaDecoderLayer'] in the model"),
)
@under_fsdp(FsdpSource.LAUNCH)
def _split_names(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find(_CLASSES)
    if said is None or _policy(fsdp) != _BY_CLASS:
        return
    names = said.value if isinstance(said.value, (list, tuple)) else str(said.value).split(",")
    plain = [str(name).strip() for name in names]
    if [*names] != plain or isinstance(said.value, (list, tuple)):
        yield hit_of(said, fix=f"write {','.join(plain)}")


@Rule(
    id="fsdp-wrap-class-unknown",
    severity=Severity.ERROR,
    summary="a class to wrap is none of the model's",
    why="accelerate looks for a module of exactly this class, and ends if the model has none",
    fix="leave transformer_layer_cls_to_wrap out: each model of transformers knows its blocks",
    see=_PLUGIN,
    evidence=fails("Could not find the transformer layer class LlamaDecodeLayer in the model"),
)
@under_fsdp()
def _unknown_class(situation: Situation, fsdp: FsdpRun) -> Iterator[Hit]:
    said = fsdp.find(_CLASSES)
    if said is None or _policy(fsdp) != _BY_CLASS or isinstance(said.value, dict):
        return
    names = said.value if isinstance(said.value, (list, tuple)) else str(said.value).split(",")
    families = model_families(situation)
    for name in (str(name).strip() for name in names):
        if not _CLASS.fullmatch(name) or _is_of_script(situation, name):
            continue
        if families and not any(is_in_code_of(name, family) in (True, None) for family in families):
            behind = f", but the model is of the family {families[0]}"
            # accelerate makes the embeddings a unit of their own, and fails if a block holds them.
            blocks = ",".join(block for block in block_classes(families[0]) if "Embed" not in block)
            yield hit_of(said, behind, fix=f"write {blocks}" if blocks else None)
        elif not families and families_with_class(name) == ():
            near = nearest(name, block_classes())
            # Without a similar one it may be a class of the repository's own model.
            if near is not None and SequenceMatcher(None, near, name).ratio() >= _LEAST_SIMILARITY:
                found = f", but transformers has no {name}"
                yield hit_of(replace(said, confidence=Confidence.LIKELY), found, fix=f"write {near}")


def _is_of_script(situation: Situation, name: str) -> bool:
    """Return True if the script has a word, which may be its own class."""
    names = situation.script_names
    return names is not None and names.has(name)


RULES = declared(vars())
