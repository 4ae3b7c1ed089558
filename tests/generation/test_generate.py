"""zerofit.generate: the plain model's tokens on any ranks, errors on all of them, and its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from grouped_results import GroupedResults
from made.tokenizers import gpt_tokenizer
from random_cases import VOCABULARY, Family
from ranks_of_generate import NEW, PROMPTS, model, tokens
from runs import run_on_ranks
from tiny_models import make_model

import zerofit
from zerofit.core.errors import UserError
from zerofit.generation.generation_job import FinishReason

_RANKS = Path(__file__).parents[1] / "support" / "ranks_of_generate.py"
_SPARSE_ENDS = list(range(0, 64, 3))
"""End-of-sequence tokens with which completions end early."""


def _alone(*prompts: Any, family: Family = Family.GPT2, **settings: Any) -> Any:
    """Return the tokens of the plain model in one process."""
    return tokens(model(family), *prompts, **settings)


_AS_ALONE: dict[str, tuple[Family, dict[str, Any]]] = {
    "data_parallel": (Family.GPT2, {}),
    "zero2": (Family.GPT2, {}),
    "zero3": (Family.GPT2, {}),
    "zero3_gathered": (Family.GPT2, {}),
    "zero3_gathered_by_the_script": (Family.GPT2, {}),
    "zero3_encoder_decoder": (Family.T5, {"num_beams": 2, "num_return_sequences": 2}),
    "zero3_sampling": (Family.GPT2, {"do_sample": True, "top_k": 0, "seed": 5}),
    "zero3_without_cache": (Family.GPT2, {"eos_token_id": _SPARSE_ENDS}),
    "prompt_lookup_in_step": (Family.GPT2, {"eos_token_id": _SPARSE_ENDS}),
}
"""Cases in which both ranks get the tokens of one process with these settings."""
_ANSWERS: dict[str, Callable[[], list[Any]]] = {
    # While tokens are chosen, all weights are whole only where they were gathered.
    "zero3_weights_meanwhile": lambda: [{"always": [True], "never": [False]}] * 2,
    "own_prompts": lambda: [[], _alone()],
    "a_bad_temperature": lambda: ["generate-settings-disagree"] * 2,
    # What fails between two passes leaves no rank waiting, and the next call is as it should be.
    "a_bad_word": lambda: [["ValueError", _alone(PROMPTS[:1])], ["UserError", _alone(PROMPTS[:1])]],
    "a_prefix_that_allows_nothing": lambda: [
        ["ValueError", _alone(PROMPTS[:1])],
        ["UserError", _alone(PROMPTS[:1])],
    ],
    "a_criterion_without_an_answer": lambda: [
        ["TypeError", _alone(PROMPTS[:1], family=Family.T5)],
        ["UserError", _alone(PROMPTS[:1], family=Family.T5)],
    ],
    "a_function_that_fails_in_step": lambda: [
        ["RuntimeError: of the script", _alone(PROMPTS[:1])],
        ["UserError: RuntimeError: of the script", _alone(PROMPTS[:1])],
    ],
    "a_rank_that_fails_alone": lambda: [
        "UserError: RuntimeError: of the script",
        "RuntimeError: of the script",
    ],
    "shared_in_pieces": lambda: [[[], [1] * 5]] * 2,
    # Four batches, two in a step: the second start, at another stage, makes the last three prompts.
    "written": lambda: [["of-the-test", False, True, [7], _alone()]] * 2,
}
"""Results of the other cases on each rank."""
_OUT_OF_STEP = "generate-out-of-step"
_PARTITIONED = "with weights partitioned by ZeRO-3"
_ERRORS = {
    "other_prompts_on_each_rank": ("generate-prompts-differ", "7 on rank 0, 6 on rank 1, and not the same"),
    "other_settings_on_each_rank": ("generate-ranks-differ", "1 on rank 0, and 2 on rank 1"),
    "out_on_rank_0_alone": ("generate-ranks-differ", "/results.jsonl on rank 0, and None on rank 1"),
    "an_assistant_in_parts": (_OUT_OF_STEP, None),
    "weights_of_one_rank_each": ("generate-in-a-sub-group", None),
    "weights_of_fsdp": ("generate-not-under-fsdp", None),
    "gathered_under_zenflow": ("gather-under-zenflow", None),
    "scores_that_are_no_numbers": ("generate-nothing-to-draw", None),
    "an_empty_prompt_on_rank_1": ("generate-empty-prompt", None),
    "an_assistant_in_step": (_OUT_OF_STEP, f"assistant_early_exit, {_PARTITIONED}"),
    "guidance_in_step": (_OUT_OF_STEP, f"guidance_scale, {_PARTITIONED}"),
    "experts_apart": ("generate-experts-apart", f"transformer.h.0.experts, {_PARTITIONED}"),
}
"""Rule, and what was found, of the cases that end with an error on both ranks."""
_OTHER_ERRORS = ("called_on_rank_0_alone", "a_rank_that_is_silent")
_LIKE_ANOTHER = (
    *("zero2", "zero3_gathered_by_the_script", "zero3_without_cache"),
    *("a_prefix_that_allows_nothing", "a_criterion_without_an_answer", "a_rank_that_fails_alone"),
    *("weights_of_one_rank_each", "gathered_under_zenflow", "guidance_in_step"),
    *("zero3_encoder_decoder", "prompt_lookup_in_step", "an_assistant_in_step", "out_on_rank_0_alone"),
)
"""Slow cases, which go the way of others."""
_SLOW_CASES = ("zero3_in_bf16_autocast", "in_inference_mode", "a_rank_that_is_slow")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> dict[str, list[Any]]:
    """Return each case's result on each of two ranks."""
    all_cases = (*_AS_ALONE, *_ANSWERS, *_ERRORS, *_OTHER_ERRORS)
    quick = tuple(case for case in all_cases if case not in _LIKE_ANOTHER)
    return GroupedResults(lambda *cases: _run(tmp_path_factory.mktemp("ranks"), *cases), quick, _LIKE_ANOTHER)


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> dict[str, list[Any]]:
    """Return the results of the cases that take long."""
    return _run(tmp_path_factory.mktemp("slow_ranks"), *_SLOW_CASES)


def _marked(cases: Iterable[str]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow if case in _LIKE_ANOTHER else ()) for case in cases]


def _run(folder: Path, *cases: str) -> dict[str, list[Any]]:
    run_on_ranks(_RANKS, folder, "out.json", *cases)
    answers: dict[str, list[Any]] = json.loads((folder / "out.json").read_text())
    return answers


@pytest.mark.parametrize("case", _marked(_AS_ALONE))
def test_every_rank_gets_the_tokens_of_one_process(case: str, ranks: dict[str, list[Any]]) -> None:
    family, settings = _AS_ALONE[case]
    alone = _alone(family=family, **settings)
    assert ranks[case] == [alone, alone]


@pytest.mark.parametrize("case", _marked(_ANSWERS))
def test_each_rank_gets_what_is_its_own(case: str, ranks: dict[str, list[Any]]) -> None:
    assert ranks[case] == _ANSWERS[case]()


@pytest.mark.evidence
def test_autocast_of_deepspeed_is_kept(slow_ranks: dict[str, list[Any]]) -> None:
    assert slow_ranks["zero3_in_bf16_autocast"] == [[True, True]] * 2


@pytest.mark.evidence
def test_training_goes_on_after_a_call_in_inference_mode(slow_ranks: dict[str, list[Any]]) -> None:
    assert slow_ranks["in_inference_mode"] == [True, True]


@pytest.mark.parametrize("case", _marked(_ERRORS))
def test_every_rank_gets_the_error(case: str, ranks: dict[str, list[Any]]) -> None:
    rule, found = _ERRORS[case]
    assert [answer[0] for answer in ranks[case]] == [rule, rule]
    assert found is None or [answer[1] for answer in ranks[case]] == [found, found]


def test_the_rank_with_an_empty_prompt_is_named_on_the_others(ranks: dict[str, list[Any]]) -> None:
    found = [answer[1] for answer in ranks["an_empty_prompt_on_rank_1"]]
    assert found == ["prompt 1 has no tokens (on rank 1)", "prompt 1 has no tokens"]


def test_a_call_on_one_rank_alone_ends_with_the_error(ranks: dict[str, list[Any]]) -> None:
    (rule, _), other = ranks["called_on_rank_0_alone"]
    assert (rule, other) == ("generate-not-on-all-ranks", ["not called", ""])


@pytest.mark.evidence
def test_a_rank_whose_calls_take_longer_than_the_limit_is_waited_for(
    slow_ranks: dict[str, list[Any]],
) -> None:
    alone = tokens(model(), PROMPTS[:2], max_new_tokens=40, batch_size=1)
    assert slow_ranks["a_rank_that_is_slow"] == [alone, alone]


def test_a_rank_that_is_silent_is_given_up(ranks: dict[str, list[Any]]) -> None:
    rules = [rule for rule, _ in ranks["a_rank_that_is_silent"]]
    assert rules == ["generate-rank-silent", "generate-failed-on-a-rank"]


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


def test_a_criterion_that_ends_the_last_token_is_what_ended_it() -> None:
    def at_seven(input_ids: Any, scores: Any) -> bool:
        return bool(input_ids.shape[1] >= 7)

    (result,) = zerofit.generate(model(), [[3, 4, 5]], max_new_tokens=4, stopping_criteria=[at_seven])
    assert result.completions[0].finish_reason is FinishReason.STOP


def test_a_least_number_of_new_tokens_is_kept_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    (result,) = zerofit.generate(model(), [[3, 4, 5]], max_new_tokens=12, min_new_tokens=8)
    assert (len(result.tokens), [str(each.message) for each in recwarn]) == (12, [])


def test_unfinished_results_of_other_weights_are_not_continued(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyError

    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyError):
        tokens(model(), out=out, progress=stop)
    with pytest.raises(UserError) as error:
        tokens(make_model(Family.GPT2, is_tied=True, weight_seed=1), out=out, resume=True)
    assert error.value.rule == "generate-other-parts"


def test_stop_strings_end_a_completion() -> None:
    tokenizer, of = gpt_tokenizer(), _vocabulary_model()
    (free,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=6)
    stop = tokenizer.decode([free.tokens[2]])
    (ended,) = zerofit.generate(of, ["the "], tokenizer=tokenizer, max_new_tokens=6, stop_strings=stop)
    assert stop in (ended.text or "")
    assert len(ended.tokens) <= 3


def test_new_tokens_may_differ_from_prompt_to_prompt() -> None:
    import torch

    lengths = [1, 3, 2, 9, 4, 1, 1]
    for given in (lengths, torch.tensor(lengths)):
        assert [len(each[0]) for each in tokens(model(), max_new_tokens=given)] == lengths
    assert [len(each[0]) for each in tokens(model(), max_new_tokens=torch.tensor(2))] == [2] * 7


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
        ({"generation_config": "nowhere"}, "generate-settings-disagree", "generation_config='nowhere'"),
        ({"streamer": 1}, "generate-setting-without-meaning", "streamer=1"),
        ({"max_length": 9}, "generate-setting-without-meaning", "max_length=9"),
        ({"min_length": 9}, "generate-setting-without-meaning", None),
        ({"synced_gpus": True}, "generate-setting-without-meaning", "synced_gpus=True"),
        ({"num_return_sequences": 2}, "generate-settings-disagree", None),
        ({"max_new_tokens": None}, "generate-needs-max-new-tokens", None),
        ({"max_new_tokens": [3]}, "generate-max-new-tokens", "1 of them for 7 prompts"),
        ({"max_new_tokens": 2.5}, "generate-max-new-tokens", "max_new_tokens=2.5"),
        ({"batch_size": 0}, "generate-batch-size", "batch_size=0"),
        ({"batch_size": "2"}, "generate-batch-size", "batch_size='2'"),
        ({"num_beams": 0}, "generate-settings-disagree", "num_beams=0"),
        ({"eos_token_id": "x"}, "generate-settings-disagree", "eos_token_id='x'"),
        ({"generation_config": 5}, "generate-settings-disagree", "generation_config=5"),
        ({"logits_processor": 5}, "generate-settings-disagree", None),
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
