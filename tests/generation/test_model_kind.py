"""What generates is found under every wrapper, with its positions; what can't be served is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from random_cases import MAX_POSITIONS, Family
from tiny_models import make_model

from zerofit.core.errors import UserError
from zerofit.generation.model_kind import Positions, read_kind
from zerofit.generation.prompts import check_lengths, lengths_of


def _model(family: Family = Family.GPT2) -> Any:
    return make_model(family, is_tied=True, weight_seed=0)


def _compiled(model: Any) -> Any:
    import torch

    return torch.compile(model)


def _data_parallel(model: Any) -> Any:
    import torch

    return torch.nn.DataParallel(model)


def _prepared(model: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


@pytest.mark.parametrize("wrap", [lambda model: model, _compiled, _data_parallel, _prepared])
def test_the_model_is_found_under_its_wrapper(wrap: Callable[[Any], Any]) -> None:
    model = _model()
    kind = read_kind(wrap(model))
    assert kind.model is kind.generator is model
    assert not kind.is_partitioned
    assert kind.takes_mask


def test_an_adapter_of_peft_generates_itself_and_its_virtual_tokens_take_positions() -> None:
    from peft import PromptTuningConfig, get_peft_model

    model = _model()
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5))
    kind = read_kind(adapted)
    assert kind.generator is adapted
    assert kind.model is model
    assert kind.positions.num_tokens == MAX_POSITIONS - 5


def _config(name: str, **settings: Any) -> Any:
    import transformers

    return getattr(transformers, f"{name}Config")(**settings)


_ROTARY = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "intermediate_size": 8,
    "max_position_embeddings": 16,
}
_THETA = {"rope_theta": 10000.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("name", "settings", "encoder", "decoder"),
    [
        ("GPT2", {"n_positions": 64, "n_layer": 1, "n_embd": 8, "n_head": 1}, None, 64),
        ("Bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 1}, None, None),
        (
            "Bart",
            {"max_position_embeddings": 32, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1},
            32,
            32,
        ),
        ("T5", {"d_model": 8, "num_layers": 1, "num_heads": 1, "n_positions": 512}, None, None),
        (
            "LED",
            {
                "max_encoder_position_embeddings": 48,
                "max_decoder_position_embeddings": 16,
                "d_model": 16,
                "encoder_layers": 1,
                "decoder_layers": 1,
            },
            48,
            16,
        ),
        ("Llama", {**_ROTARY, "rope_parameters": {"rope_type": "yarn", "factor": 4.0, **_THETA}}, None, 64),
        ("Llama", {**_ROTARY, "rope_parameters": {"rope_type": "linear", "factor": 2.0, **_THETA}}, None, 32),
        (
            "Llama",
            {**_ROTARY, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **_THETA}},
            None,
            None,
        ),
        (
            "Falcon",
            {"alibi": True, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1},
            None,
            None,
        ),
    ],
)
def test_positions_are_those_of_the_architecture(
    name: str, settings: dict[str, Any], encoder: int | None, decoder: int | None
) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = _config(name, vocab_size=16, **settings)
    make = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    assert read_kind(make.from_config(config)).positions == Positions(
        num_prompt_tokens=encoder, num_tokens=decoder
    )


def test_one_rank_finds_its_weights_by_zeros_hooks_too() -> None:
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    model = _model()
    for number, weight in enumerate(model.parameters()):
        weight.ds_id, weight.ds_process_group = number, None
        weight.ds_status = SimpleNamespace(name="NOT_AVAILABLE")
    distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        kind = read_kind(model)
    finally:
        distributed.destroy_process_group()
    assert kind.is_zero3
    assert kind.is_partitioned


def test_drafted_tokens_take_positions_of_a_decoder_alone() -> None:
    assert Positions(num_prompt_tokens=8, num_tokens=64).less(10) == Positions(
        num_prompt_tokens=8, num_tokens=54
    )
    unlimited = Positions(num_prompt_tokens=None, num_tokens=None)
    assert unlimited.less(10) == unlimited


def test_what_can_not_generate_is_refused() -> None:
    import torch

    with pytest.raises(UserError) as error:
        read_kind(torch.nn.Linear(2, 2))
    assert (error.value.rule, error.value.found) == ("generate-not-a-model", "Linear")


@pytest.mark.parametrize(
    ("prompt", "new", "is_encoder_decoder", "positions", "found"),
    [
        (60, 4, False, (None, 64), None),
        (
            61,
            4,
            False,
            (None, 64),
            "prompt 1 has 61 tokens, and max_new_tokens=4: 65 together, the model has 64 positions",
        ),
        (64, 63, True, (64, 64), None),
        (65, 3, True, (64, 64), "prompt 1 has 65 tokens, the encoder 64 positions"),
        (
            5,
            64,
            True,
            (64, 64),
            "the decoder's start has 1 token, and max_new_tokens=64: 65 together, the model has 64 positions",
        ),
        (5000, 64, True, (None, None), None),
    ],
)
def test_a_prompt_that_is_too_long_is_named_with_the_limit(
    prompt: int,
    new: int,
    is_encoder_decoder: bool,
    positions: tuple[int | None, int | None],
    found: str | None,
) -> None:
    prompts, lengths = [(3,), tuple(range(prompt))], (1, new)
    limits = Positions(num_prompt_tokens=positions[0], num_tokens=positions[1])
    if found is None:
        check_lengths(prompts, lengths, limits, is_encoder_decoder=is_encoder_decoder)
        return
    with pytest.raises(UserError) as error:
        check_lengths(prompts, lengths, limits, is_encoder_decoder=is_encoder_decoder)
    assert (error.value.rule, error.value.found) == ("generate-prompt-too-long", found)


@pytest.mark.parametrize(
    ("given", "of_settings", "rule"),
    [
        (None, None, "generate-needs-max-new-tokens"),
        (0, None, "generate-max-new-tokens"),
        ([3, 0], None, "generate-max-new-tokens"),
        ([3], 7, "generate-max-new-tokens"),
    ],
)
def test_a_wrong_number_of_new_tokens_is_refused(given: Any, of_settings: int | None, rule: str) -> None:
    with pytest.raises(UserError) as error:
        lengths_of(given, of_settings, num_prompts=2)
    assert error.value.rule == rule


def test_new_tokens_are_those_given_or_those_of_the_settings() -> None:
    assert lengths_of(None, 7, num_prompts=2) == (7, 7)
    assert lengths_of(3, 7, num_prompts=2) == (3, 3)
    assert lengths_of([3, 4], 7, num_prompts=2) == (3, 4)
