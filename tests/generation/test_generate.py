"""zerofit.generate: the plain model's tokens on any ranks, errors on all of them, and its settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from made.tokenizers import gpt_tokenizer
from random_cases import VOCABULARY, Family
from ranks_of_generate import NEW, PROMPTS, model, tokens
from runs import run_command

import zerofit
from zerofit.errors import UserError
from zerofit.generated import FinishReason

_RANKS = Path(__file__).parent / "ranks_of_generate.py"
_AS_ALONE = ("data_parallel", "zero2", "zero3", "zero3_gathered", "zero3_gathered_by_the_script")
_OTHER_CASES = (
    "zero3_in_bf16_autocast",
    "zero3_encoder_decoder",
    "zero3_sampling",
    "zero3_without_cache",
    "own_prompts",
    "in_inference_mode",
    "other_prompts_on_each_rank",
    "other_settings_on_each_rank",
    "an_empty_prompt_on_rank_1",
    "an_assistant_in_step",
    "guidance_in_step",
    "experts_apart",
    "a_bad_temperature",
    "a_function_that_fails_in_step",
    "a_rank_that_is_slow",
    "a_rank_that_fails_alone",
    "written",
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> dict[str, list[Any]]:
    """What each case gave on each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    flags = "-m torch.distributed.run --standalone --nproc_per_node=2"
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *flags.split(), str(_RANKS), "out.json", *_AS_ALONE, *_OTHER_CASES]
    run_command(command, folder, **on_cpu).check()
    answers: dict[str, list[Any]] = json.loads((folder / "out.json").read_text())
    return answers


@pytest.mark.parametrize("case", _AS_ALONE)
def test_every_rank_gets_the_tokens_of_the_plain_model(case: str, ranks: dict[str, list[Any]]) -> None:
    alone = tokens(model())
    assert ranks[case] == [alone, alone]


@pytest.mark.parametrize(
    ("case", "family", "settings"),
    [
        ("zero3_encoder_decoder", Family.T5, {"num_beams": 2, "num_return_sequences": 2}),
        ("zero3_sampling", Family.GPT2, {"do_sample": True, "top_k": 0, "seed": 5}),
        ("zero3_without_cache", Family.GPT2, {"eos_token_id": list(range(0, 64, 3))}),
    ],
)
def test_settings_give_the_same_tokens_on_two_ranks_as_on_one(
    case: str, family: Family, settings: dict[str, Any], ranks: dict[str, list[Any]]
) -> None:
    alone = tokens(model(family), **settings)
    assert ranks[case] == [alone, alone]


def test_each_rank_gets_the_results_of_its_own_prompts(ranks: dict[str, list[Any]]) -> None:
    assert ranks["own_prompts"] == [[], tokens(model())]


def test_autocast_of_deepspeed_is_kept(ranks: dict[str, list[Any]]) -> None:
    assert ranks["zero3_in_bf16_autocast"] == [[True, True]] * 2


def test_training_goes_on_after_a_call_in_inference_mode(ranks: dict[str, list[Any]]) -> None:
    assert ranks["in_inference_mode"] == [True, True]


@pytest.mark.parametrize(
    ("case", "rule", "found"),
    [
        (
            "other_prompts_on_each_rank",
            "generate-prompts-differ",
            "7 on rank 0, 6 on rank 1, and not the same",
        ),
        ("other_settings_on_each_rank", "generate-ranks-differ", None),
        ("an_empty_prompt_on_rank_1", "generate-empty-prompt", None),
        (
            "an_assistant_in_step",
            "generate-out-of-step",
            "prompt_lookup_num_tokens, and weights that ZeRO-3 partitions over the ranks",
        ),
        (
            "guidance_in_step",
            "generate-out-of-step",
            "guidance_scale, and weights that ZeRO-3 partitions over the ranks",
        ),
        (
            "experts_apart",
            "generate-experts-apart",
            "transformer.h.0.experts, and weights that ZeRO-3 partitions over the ranks",
        ),
    ],
)
def test_every_rank_gets_the_error(
    case: str, rule: str, found: str | None, ranks: dict[str, list[Any]]
) -> None:
    assert [answer[0] for answer in ranks[case]] == [rule, rule]
    assert found is None or [answer[1] for answer in ranks[case]] == [found, found]


def test_the_rank_with_an_empty_prompt_is_named_on_the_others(ranks: dict[str, list[Any]]) -> None:
    found = [answer[1] for answer in ranks["an_empty_prompt_on_rank_1"]]
    assert found == ["prompt 1 has no tokens (on rank 1)", "prompt 1 has no tokens"]


def test_settings_that_transformers_refuses_fail_on_ranks_without_prompts_too(
    ranks: dict[str, list[Any]],
) -> None:
    assert ranks["a_bad_temperature"] == ["generate-settings-disagree"] * 2


def test_a_function_of_the_script_that_fails_leaves_no_rank_waiting(ranks: dict[str, list[Any]]) -> None:
    (of_first, after), (of_second, after_second) = ranks["a_function_that_fails_in_step"]
    assert of_first == "RuntimeError: of the script"
    assert of_second == "UserError: RuntimeError: of the script"
    assert after == after_second == tokens(model(), PROMPTS[:1])


def test_a_rank_whose_calls_take_longer_than_the_limit_is_waited_for(ranks: dict[str, list[Any]]) -> None:
    alone = tokens(model(), PROMPTS[:2], max_new_tokens=40, batch_size=1)
    assert ranks["a_rank_that_is_slow"] == [alone, alone]


def test_a_rank_that_fails_alone_fails_on_the_others(ranks: dict[str, list[Any]]) -> None:
    assert ranks["a_rank_that_fails_alone"] == [
        "UserError: RuntimeError: of the script",
        "RuntimeError: of the script",
    ]


def test_unfinished_results_are_continued(ranks: dict[str, list[Any]]) -> None:
    alone = tokens(model())
    # Four batches, two in a step: the second start makes the last three prompts.
    assert ranks["written"] == [["of-the-test", False, True, [7], alone]] * 2


def _vocabulary_model() -> Any:
    """A model with a token for each of the tokenizer's."""
    of = model()
    of.resize_token_embeddings(len(gpt_tokenizer()))
    return of


def test_text_comes_without_special_tokens_and_says_why_it_ended() -> None:
    tokenizer, of = gpt_tokenizer(), _vocabulary_model()
    (result,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=5)
    assert result.text == tokenizer.decode(result.tokens, skip_special_tokens=True)
    assert result.num_prompt_tokens == len(tokenizer("the ")["input_ids"])
    assert result.completions[0].finish_reason is FinishReason.LENGTH
    end = result.tokens[1]
    (ended,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=5, eos_token_id=end)
    assert ended.completions[0].finish_reason is FinishReason.STOP
    assert ended.tokens == result.tokens[: result.tokens.index(end) + 1]


def test_a_stopping_criterion_ends_each_row_where_it_says() -> None:
    def at_even(input_ids: Any, scores: Any) -> Any:
        return input_ids[:, -1] % 2 == 0

    free = tokens(model())
    stopped = tokens(model(), stopping_criteria=[at_even])
    for (without,), (with_it,) in zip(free, stopped, strict=True):
        even = [place for place, token in enumerate(without) if token % 2 == 0]
        assert with_it == without[: even[0] + 1 if even else NEW]


def test_stop_strings_end_a_completion() -> None:
    tokenizer, of = gpt_tokenizer(), _vocabulary_model()
    (free,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=6)
    stop = tokenizer.decode([free.tokens[2]])
    (ended,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=6, stop_strings=stop)
    assert stop in (ended.text or "")
    assert len(ended.tokens) <= 3


def test_new_tokens_may_differ_from_prompt_to_prompt() -> None:
    lengths = [1, 3, 2, 9, 4, 1, 1]
    assert [len(each[0]) for each in tokens(model(), max_new_tokens=lengths)] == lengths


def test_settings_are_read_from_an_object_a_mapping_a_file_and_a_folder(tmp_path: Path) -> None:
    from transformers import GenerationConfig

    settings = {"num_beams": 2, "max_new_tokens": 4}
    config = GenerationConfig(**settings)
    config.save_pretrained(tmp_path)
    expected = tokens(model(), num_beams=2, max_new_tokens=4)
    for given in (config, settings, tmp_path, str(tmp_path / "generation_config.json")):
        assert tokens(model(), generation_config=given, max_new_tokens=None) == expected


@pytest.mark.parametrize(
    ("settings", "rule", "found"),
    [
        ({"num_beam": 2}, "generate-unknown-setting", "num_beam=2"),
        ({"generation_config": {"top": 2}}, "generate-unknown-setting", "top=2"),
        ({"generation_config": "nowhere"}, "generate-no-generation-config", None),
        ({"streamer": 1}, "generate-setting-without-meaning", "streamer=1"),
        ({"max_length": 9}, "generate-setting-without-meaning", "max_length=9"),
        ({"min_length": 9}, "generate-setting-without-meaning", None),
        ({"synced_gpus": True}, "generate-setting-without-meaning", "synced_gpus=True"),
        ({"num_return_sequences": 2}, "generate-settings-disagree", None),
        ({"max_new_tokens": None}, "generate-needs-max-new-tokens", None),
        ({"max_new_tokens": [3]}, "generate-max-new-tokens", "1 of them for 7 prompts"),
        ({"batch_size": 0}, "generate-batch-size", "batch_size=0"),
        ({"gather": "often"}, "generate-gather", "gather='often'"),
        ({"prompt_lookup_num_tokens": 2}, "generate-assisted-one-by-one", "batch_size=2"),
        ({"stop_strings": "x"}, "generate-needs-tokenizer", "stop_strings='x' and no tokenizer"),
        ({"prompts": [[VOCABULARY]]}, "generate-unknown-token", None),
    ],
)
def test_what_can_not_be_done_is_said(settings: dict[str, Any], rule: str, found: str | None) -> None:
    with pytest.raises(UserError) as error:
        tokens(model(), **settings)
    assert error.value.rule == rule
    assert found in (None, error.value.found)


def test_a_misspelt_setting_is_shown_its_nearest() -> None:
    with pytest.raises(UserError) as error:
        tokens(model(), temperatur=0.5)
    assert error.value.fix == "use temperature"


def test_prompt_lookup_gives_the_same_tokens_where_no_rank_waits() -> None:
    assert tokens(model(), prompt_lookup_num_tokens=2, batch_size=1) == tokens(model(), batch_size=1)


def test_no_prompts_are_no_results(tmp_path: Path) -> None:
    assert zerofit.generate(model(), [], max_new_tokens=3, out=tmp_path / "out.jsonl") == []
    assert (tmp_path / "out.jsonl").read_text() == ""


def test_progress_counts_to_all_prompts() -> None:
    seen: list[tuple[int, int]] = []
    tokens(model(), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (7, 7)
    assert seen == sorted(seen)
