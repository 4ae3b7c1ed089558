"""A rank of the tests of zerofit.generate: runs the cases that are named, and writes what each gave.

Usage: torchrun --nproc_per_node 2 ranks_of_generate.py OUT CASE...; rank 0 writes OUT: of each case, what
each rank answered.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from random_cases import VOCABULARY, Family
from tiny_engines import engine_of
from tiny_models import make_model

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPTS = [[3 + (7 * index + place) % 50 for place in range(1 + index % 5)] for index in range(7)]
NEW = 9


def main(out: Path, names: list[str]) -> None:
    """Run the cases one after the other."""
    import deepspeed
    from torch import distributed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    answers = {}
    for name in names:
        mine = _SIMPLE.get(name, globals().get(name))(distributed.get_rank())
        each: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(each, mine)
        answers[name] = each
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(answers))
    distributed.barrier()


def model(family: Family = Family.GPT2) -> Any:
    """Return the same model on every rank."""
    return make_model(family, is_tied=True, weight_seed=0)


def engine(of: Any | None = None, **settings: Any) -> Any:
    """Return a DeepSpeed engine of a model, in training."""
    return engine_of(of or model(), **settings)


@functools.cache
def shared() -> Any:
    """Return an engine at ZeRO-3 for all cases that leave it as it is."""
    return engine()


@functools.cache
def shared_t5() -> Any:
    """Return one with an encoder."""
    return engine(model(Family.T5))


def tokens(of: Any, prompts: Any = PROMPTS, **settings: Any) -> list[Any]:
    """Return the tokens of each completion of each prompt."""
    import zerofit

    settings = {"max_new_tokens": NEW, "batch_size": 2, "gather": "never", **settings}
    results = zerofit.generate(of, prompts, **settings)
    assert [result.index for result in results] == list(range(len(results)))
    return [[list(each.tokens) for each in result.completions] for result in results]


def error_of(of: Any, prompts: Any = PROMPTS, **settings: Any) -> list[str]:
    """Return the rule and what was found of the error that a call ends with."""
    from zerofit import UserError

    try:
        tokens(of, prompts, **settings)
    except UserError as error:
        return [error.rule, error.found]
    return ["no error", ""]


def said_by(of: Any, prompts: Any, **settings: Any) -> str:
    """Return what a call ends with, whatever it is."""
    try:
        tokens(of, prompts, **settings)
    except Exception as error:
        return f"{type(error).__name__}: {getattr(error, 'found', error)}"
    return "no error"


def data_parallel(rank: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return tokens(DistributedDataParallel(model()))


def zero3_weights_meanwhile(rank: int) -> Any:
    """Return of each way to gather whether all weights were whole whenever a token was chosen."""
    from zerofit.generation.gathering import is_available

    of = shared()
    seen: dict[str, set[bool]] = {"always": set(), "never": set()}
    for gather, whole in seen.items():

        def look(ids: Any, scores: Any, whole: set[bool] = whole) -> Any:
            whole.add(all(map(is_available, of.parameters())))
            return scores

        tokens(of, gather=gather, logits_processor=[look])
    return {gather: sorted(whole) for gather, whole in seen.items()}


def zero3_gathered_by_the_script(rank: int) -> Any:
    import deepspeed

    of = shared()
    with deepspeed.zero.GatheredParameters(list(of.parameters())):
        return tokens(of)


def zero3_in_bf16_autocast(rank: int) -> Any:
    untied = make_model(Family.GPT2, is_tied=False, weight_seed=0)
    of = engine(untied, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    return [tokens(of) == tokens(of.module), tokens(of) == tokens(of, gather="always")]


def in_inference_mode(rank: int) -> Any:
    import torch

    of, batch, losses = engine(), torch.tensor([[3, 4, 5, 6 + rank]]), []
    for is_first in (True, False):
        loss = of(input_ids=batch, labels=batch).loss
        of.backward(loss)
        of.step()
        losses.append(loss.item())
        if is_first:
            with torch.inference_mode():
                tokens(of)
    return losses[1] < losses[0]


def weights_of_one_rank_each(rank: int) -> Any:
    import deepspeed
    from torch import distributed

    of, groups = model(), [distributed.new_group([each]) for each in range(distributed.get_world_size())]
    deepspeed.zero.Init(module=of, data_parallel_group=groups[rank])
    return error_of(of)


def weights_of_fsdp(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    of = model()
    fully_shard(of, mesh=init_device_mesh("cpu", (2,)))
    return error_of(of)


def gathered_under_zenflow(rank: int) -> Any:
    offload = shared().optimizer.parameter_offload
    before, offload.zenflow = offload.zenflow, True
    try:
        return error_of(shared(), gather="always")
    finally:
        offload.zenflow = before


def experts_apart(rank: int) -> Any:
    import torch

    of = model()
    of.transformer.h[0].experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    return error_of(engine(of))


def a_bad_word(rank: int) -> Any:
    said = said_by(shared(), PROMPTS[:1], bad_words_ids=[[VOCABULARY + 50]])
    return [said.partition(":")[0], tokens(shared(), PROMPTS[:1])]


def a_prefix_that_allows_nothing(rank: int) -> Any:
    def allowed(batch: int, input_ids: Any) -> list[int]:
        return [3] if len(input_ids) < 7 else []

    return [
        said_by(shared(), PROMPTS[4:5], prefix_allowed_tokens_fn=allowed).partition(":")[0],
        tokens(shared(), PROMPTS[:1]),
    ]


def a_criterion_without_an_answer(rank: int) -> Any:
    def forgets(input_ids: Any, scores: Any) -> Any:
        return None if input_ids.shape[1] > 3 else False

    said = said_by(shared_t5(), PROMPTS[:1], stopping_criteria=[forgets], num_beams=2)
    return [said.partition(":")[0], tokens(shared_t5(), PROMPTS[:1])]


def scores_that_are_no_numbers(rank: int) -> Any:
    of_nan = [lambda input_ids, scores: scores * float("nan")]
    return error_of(shared(), PROMPTS[:1], logits_processor=of_nan, do_sample=True)


def a_function_that_fails_in_step(rank: int) -> Any:
    def fail(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] > 6:
            raise RuntimeError("of the script")
        return scores

    return [said_by(shared(), PROMPTS[4:5], logits_processor=[fail]), tokens(shared(), PROMPTS[:1])]


def a_rank_that_fails_alone(rank: int) -> Any:
    def fail(input_ids: Any, scores: Any) -> Any:
        if rank:
            raise RuntimeError("of the script")
        return scores

    return said_by(model(), PROMPTS, logits_processor=[fail])


def a_rank_that_is_silent(rank: int) -> Any:
    def wait(input_ids: Any, scores: Any) -> Any:
        time.sleep(2 * rank)
        return scores

    return error_of(model(), PROMPTS[:2], logits_processor=[wait], max_new_tokens=1, batch_size=1, limit_s=1)


def a_rank_that_is_slow(rank: int) -> Any:
    def wait(input_ids: Any, scores: Any) -> Any:
        time.sleep(0.1 * rank)
        return scores

    # Its calls take longer than the limit, each token less.
    return tokens(model(), PROMPTS[:2], logits_processor=[wait], max_new_tokens=40, batch_size=1, limit_s=3)


def shared_in_pieces(rank: int) -> Any:
    from zerofit.ranks import exchange as ranks

    ranks._LEAST_BYTES = ranks._BYTES_AT_A_TIME = 3
    try:
        return ranks.all_ranks().share_all([rank] * 5 * rank)
    finally:
        ranks._LEAST_BYTES = ranks._BYTES_AT_A_TIME = 2**20


def written(rank: int) -> Any:
    """A file for all results, in a folder that both ranks see: begun by whole models, continued by ZeRO-3."""
    from zerofit import UserError

    out, of = Path("results.jsonl"), shared()

    def stop(done: int, total: int) -> None:
        if done >= 4:
            raise UserError("of-the-test", "stop", found="", why="", fix="")

    first = error_of(model(), out=out, progress=stop)[0]
    is_there = out.exists()
    seen: list[int] = []
    again = tokens(of, out=out, resume=True, progress=lambda done, total: seen.append(done))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    same = [[each["tokens"] for each in line["completions"]] for line in lines] == again
    return [first, is_there, same, seen, again]


_SIMPLE: dict[str, Callable[[int], Any]] = {
    "zero2": lambda rank: tokens(engine(zero={"stage": 2})),
    "zero3": lambda rank: tokens(shared()),
    "zero3_gathered": lambda rank: tokens(shared(), gather="always"),
    "zero3_encoder_decoder": lambda rank: tokens(shared_t5(), num_beams=2, num_return_sequences=2),
    "zero3_sampling": lambda rank: tokens(shared(), do_sample=True, top_k=0, seed=5),
    # Prompts of different lengths, and one rank ends early: its mask would outgrow its tokens.
    "zero3_without_cache": lambda rank: tokens(shared(), use_cache=False, eos_token_id=list(range(0, 64, 3))),
    "own_prompts": lambda rank: tokens(shared(), PROMPTS if rank else [], per_rank=True),
    "other_prompts_on_each_rank": lambda rank: error_of(shared(), PROMPTS[rank:]),
    "other_settings_on_each_rank": lambda rank: error_of(shared(), num_beams=1 + rank),
    "out_on_rank_0_alone": lambda rank: error_of(shared(), out=None if rank else "/results.jsonl", limit_s=9),
    "an_empty_prompt_on_rank_1": lambda rank: error_of(shared(), [[3], []] if rank else [[3]], per_rank=True),
    "an_assistant_in_step": lambda rank: error_of(shared(), assistant_early_exit=1, batch_size=1),
    # Ends early on one rank and not on the other, and leaves a rank without a prompt in the last step.
    "prompt_lookup_in_step": lambda rank: tokens(
        shared(), prompt_lookup_num_tokens=3, batch_size=1, eos_token_id=list(range(0, 64, 3))
    ),
    "an_assistant_in_parts": lambda rank: error_of(model(), assistant_model=shared().module, batch_size=1),
    "called_on_rank_0_alone": lambda rank: ["not called", ""] if rank else error_of(shared(), limit_s=1),
    "guidance_in_step": lambda rank: error_of(shared(), guidance_scale=1.5),
    # One prompt, so that rank 1 takes part with a dummy, which has no temperature.
    "a_bad_temperature": lambda rank: error_of(shared(), PROMPTS[:1], do_sample=True, temperature=0.0)[0],
}
"""Cases of one call, given the rank."""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
