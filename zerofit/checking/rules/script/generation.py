"""Rules on scripts: keeping ranks in step during generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import HANGS, Hit, Rule, Severity, declared, fails
from zerofit.checking.rules.script.hits import OF_ENGINE, at_stages, hit, uneven_share_text, unguarded_calls
from zerofit.core.setting import Confidence
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall


_DOCS = "https://huggingface.co/docs/accelerate/v1.15.0"
_GENERATION = "https://github.com/huggingface/transformers/blob/v5.23.0/src/transformers/generation"


@Rule(
    id="zero3-ranks-run-equally-often",
    severity=Severity.ERROR,
    summary="under ZeRO-3 every rank must run the model as often as the others",
    why="a rank without prompts or batches no longer sends its part of the weights",
    fix="call zerofit.generate(model, prompts) on every rank, or pad each rank's part to one length: "
    "split_between_processes(prompts, apply_padding=True)",
    see=f"{_DOCS}/usage_guides/distributed_inference",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _runs_more_often_on_one_rank(situation: Situation) -> Iterator[Hit]:
    for call in _runs(situation, Action.GENERATE, Action.FORWARD):
        if call.share is not None:
            yield hit(call.seen, uneven_share_text(call.share), Confidence.POSSIBLE)


def _runs(situation: Situation, *actions: Action) -> Iterator[ScriptCall]:
    """Yield the calls that run a partitioned model on every rank."""
    for call in unguarded_calls(situation, *actions):
        if call.state in OF_ENGINE and not call.one_rank:
            yield call


@Rule(
    id="zero3-no-assisted-generation",
    severity=Severity.ERROR,
    summary="under ZeRO-3 an assistant model gets ranks out of step",
    why="it generates in each round, as often as the rank's prompt needs, and waits for all ranks",
    fix="leave the assistant out; prompt_lookup_num_tokens runs no second model and stays in step",
    see=f"{_GENERATION}/candidate_generator.py",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _assisted(situation: Situation) -> Iterator[Hit]:
    for call in _runs(situation, Action.GENERATE):
        if _sets(call, "assistant_model") or _sets(call, "assistant_early_exit"):
            yield hit(call.seen)


def _sets(call: ScriptCall, name: str) -> bool:
    keyword = call.keyword(name)
    return name in call.given and not (keyword is not None and keyword.value is None)


@Rule(
    id="zero3-no-chunked-prefill",
    severity=Severity.ERROR,
    summary="under ZeRO-3 prefill_chunk_size gets ranks with prompts of different lengths out of step",
    why="each chunk of a prompt is a forward pass, and a longer prompt has more of them",
    fix="leave prefill_chunk_size out, or pad the prompts of all ranks to one length",
    see=f"{_GENERATION}/utils.py",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _prefills_in_chunks(situation: Situation) -> Iterator[Hit]:
    for call in _runs(situation, Action.GENERATE):
        if _sets(call, "prefill_chunk_size"):
            yield hit(call.seen, confidence=Confidence.POSSIBLE)


@Rule(
    id="gather-needs-padded-tokens",
    severity=Severity.ERROR,
    summary="generated tokens must be padded before gathering",
    why="the longest completion differs between ranks, and gather() needs tensors of the same shape",
    fix="gather accelerator.pad_across_processes(tokens, dim=1), or call zerofit.generate()",
    see=f"{_DOCS}/package_reference/accelerator#accelerate.Accelerator.pad_across_processes",
    evidence=fails("Received data size doesn't match expected size"),
)
def _gathers_ragged(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or (situation.topology is not None and situation.topology.world_size == 1):
        return
    for call in script.find(Action.GATHER):
        if call.new_tokens is not None:
            yield hit(call.seen, " of the output of generate()", call.new_tokens)


RULES = declared(vars())
