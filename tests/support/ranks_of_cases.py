"""One rank that runs many cases in turn, each with its own engine.

Usage: torchrun --nproc_per_node N ranks_of_cases.py FOLDER NUMBER...; ranks write FOLDER/NUMBER/rank0.json
and so on.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heart import LIMIT_S, START_S, Heart
from random_cases import Case, Engine, GivenAs, make_case
from references import MODEL_FOLDER, read_expected
from tiny_engines import config_of, engine_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from random_cases import Prompt

_SMALL = 100
"""Numbers of a parameter up to which DeepSpeed keeps it whole, where a case wants that."""


def main(folder: Path, numbers: Sequence[int]) -> None:
    """Run cases one after the other."""
    import deepspeed

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heart = Heart(folder, rank)
    heart.beat("start", limit_s=START_S)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for number in numbers:
        heart.beat(f"{number} engine")
        case = make_case(number, world_size=world_size)
        results = run_case(case, folder / str(number), rank=rank, heart=heart)
        (folder / str(number) / f"rank{rank}.json").write_text(json.dumps(results))
    heart.beat("end")
    os._exit(0)  # threads of gloo sometimes abort a process that is torn down


def run_case(case: Case, folder: Path, *, rank: int, heart: Heart) -> list[list[dict[str, Any]]]:
    """Return what each call gave on this rank."""
    import zerofit

    expected = read_expected(folder)
    own = case.prompts_of(rank)
    with engine_for(case, folder / MODEL_FOLDER) as engine:
        before = _state(engine)
        calls = []
        for call in range(case.num_calls):
            heart.beat(f"{case.number} call {call}")
            found = zerofit.generate(
                engine,
                given(own, case),
                max_new_tokens=[prompt.max_new_tokens for prompt in own],
                batch_size=case.batch_size,
                per_rank=not case.is_shared,
                gather=case.gather,
                seed=case.seed,
                limit_s=LIMIT_S * 0.8,
                progress=lambda done, total, call=call: heart.beat(
                    f"{case.number} call {call}: {done}/{total}"
                ),
                **case.settings,
                **expected.special,
            )
            calls.append([_as_document(one) for one in found])
            left = _state(engine)
            changed = {name: (was, left[name]) for name, was in before.items() if left[name] != was}
            assert not changed, f"the call left otherwise than they were: {changed}"
        heart.beat(f"{case.number} end")
    return calls


def given(prompts: Sequence[Prompt], case: Case) -> list[Any]:
    """Return prompts as the caller of a case has them."""
    import torch

    rows = [list(prompt.tokens) for prompt in prompts]
    if case.given_as is GivenAs.LISTS:
        return rows
    if case.given_as is GivenAs.TENSORS:
        return [torch.tensor(row) for row in rows]
    return [_batch(rows[begin : begin + 2]) for begin in range(0, len(rows), 2)]


def _batch(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Pad on the right, as collators for training do."""
    import torch

    longest = max(len(row) for row in rows)
    return {
        "input_ids": torch.tensor([[*row, *(0 for _ in range(longest - len(row)))] for row in rows]),
        "attention_mask": torch.tensor([[int(at < len(row)) for at in range(longest)] for row in rows]),
    }


@contextmanager
def engine_for(case: Case, model_folder: Path) -> Iterator[Any]:
    """Give a case's engine; afterwards nothing of it is left in this process."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    model_class = AutoModelForSeq2SeqLM if case.family.has_encoder else AutoModelForCausalLM
    with ExitStack() as stack:
        accelerator = stack.enter_context(_accelerator(case)) if case.engine is Engine.ACCELERATE else None
        if case.has_living_config and accelerator is None:
            stack.enter_context(_living_config(case))
        model = model_class.from_pretrained(model_folder)
        trains = case.engine is Engine.TRAINING
        if accelerator is None:
            engine = engine_of(model, trains=trains, zero=_zero(case))
        else:
            engine = accelerator.prepare(model)
            engine.train(trains)
        yield engine
        engine.destroy()


def _zero(case: Case) -> dict[str, Any]:
    zero: dict[str, Any] = {}
    if case.keeps_small_parameters:
        zero["stage3_param_persistence_threshold"] = _SMALL
    if case.param_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": False}
    return zero


@contextmanager
def _living_config(case: Case) -> Iterator[None]:
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    living = HfDeepSpeedConfig(config_of(zero=_zero(case)))
    try:
        yield
    finally:
        del living
        unset_hf_deepspeed_config()


@contextmanager
def _accelerator(case: Case) -> Iterator[Any]:
    """Make an Accelerator, and forget afterwards what it keeps for the whole process."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        PartialState(backend="gloo")
        yield Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(zero=_zero(case))))
    finally:
        del os.environ["ACCELERATE_USE_DEEPSPEED"]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()


def _state(engine: Any) -> dict[str, object]:
    """What a call must leave as it was: modes, where the weights are, this rank's random numbers."""
    import torch

    modes = {f"mode of {name}": module.training for name, module in engine.named_modules()}
    # Small parameters that DeepSpeed keeps whole become so in the first forward pass.
    places = {
        name: (parameter.ds_status.name, tuple(parameter.shape))
        for name, parameter in engine.module.named_parameters()
        if not parameter.ds_persist
    }
    return {**modes, **places, "random numbers": hash(torch.get_rng_state().numpy().tobytes())}


def _as_document(result: Any) -> dict[str, Any]:
    return {
        "index": result.index,
        "num_prompt_tokens": result.num_prompt_tokens,
        "completions": [[list(one.tokens), str(one.finish_reason)] for one in result.completions],
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(number) for number in sys.argv[2:]])
