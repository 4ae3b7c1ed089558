"""The catalog of models: complete, counted as transformers counts, equal to what was published, and fast."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tools.write_catalog import measure_model, render_sizes
from zerofit.models.catalog import (
    catalog_models,
    catalog_sizes,
    find_in_catalog,
    nearest_in_catalog,
)
from zerofit.models.dimensions import facts_of
from zerofit.models.find import probe_model
from zerofit.models.meta_device import transformers_config
from zerofit.models.source import LocatedConfig, ModelOrigin
from zerofit.models.task import Task

_CATALOG = Path(__file__).parents[2] / "zerofit" / "catalog"
_NAMES = tuple(catalog_models())
_FAMILIES = {
    *("bert", "roberta", "xlm-roberta", "deberta-v2", "distilbert", "electra", "t5", "bart", "gpt2", "opt"),
    *("gptj", "gpt_neox", "bloom", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma"),
    *("gemma2", "gemma3_text", "phi", "phi3", "falcon", "stablelm", "deepseek_v2", "deepseek_v3", "vit"),
    "whisper",
}


def test_the_catalog_holds_the_popular_families() -> None:
    assert len(_NAMES) >= 70
    assert {model.config["model_type"] for model in catalog_models().values()} >= _FAMILIES


def test_each_entry_links_to_the_config_of_its_first_hub_id() -> None:
    for model in catalog_models().values():
        assert model.source == f"https://huggingface.co/{model.hub_ids[0]}/blob/main/config.json"
        assert model.name == model.name.lower()


def test_each_entry_says_what_it_was_held_against() -> None:
    names: dict[str, set[str]] = {}
    for model in catalog_models().values():
        names.setdefault(model.checked, set()).add(model.name)
    assert set(names) == {"litgpt config.py", "transformers defaults", "published count", "general knowledge"}
    assert len(names["litgpt config.py"]) == 53
    assert names["published count"].isdisjoint(_NOT_AS_PUBLISHED)
    assert all(catalog_models()[name].published_parameters for name in names["published count"])


def test_an_entry_held_against_transformers_defaults_has_them() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    models = [model for model in catalog_models().values() if model.checked == "transformers defaults"]
    assert models
    for model in models:
        defaults = CONFIG_MAPPING[model.config["model_type"]]().to_dict()
        told = {key: value for key, value in model.config.items() if key not in ("architectures", "dtype")}
        assert {key: defaults.get(key) for key in told if key != "torch_dtype"} == {
            key: value for key, value in told.items() if key != "torch_dtype"
        }, model.name


def test_no_hub_id_stands_in_two_entries() -> None:
    hub_ids = [hub_id.lower() for model in catalog_models().values() for hub_id in model.hub_ids]
    assert sorted(hub_ids) == sorted(set(hub_ids))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3-8b", "llama-3-8b"),
        ("Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/meta-llama-3-8b-instruct", "llama-3-8b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("bert-base-uncased", "bert-base-uncased"),
        ("hfl/chinese-macbert-large", "chinese-macbert-large"),
        ("somebody/llama-3-8b", None),
        ("llama", None),
    ],
)
def test_a_model_is_found_by_name_and_hub_id_in_any_case(text: str, name: str | None) -> None:
    found = find_in_catalog(text)
    assert (found.name if found else None) == name


def test_a_misspelt_name_has_near_ones() -> None:
    assert nearest_in_catalog("lama-3-8b")[0] == "llama-3-8b"
    assert nearest_in_catalog("bigscience/blom-560m")[0] == "bloom-560m"
    assert nearest_in_catalog("zzzz") == ()


def test_every_model_has_sizes_for_the_task_of_its_config() -> None:
    for name in _NAMES:
        assert probe_model(name).facts.num_parameters > 0


_NOT_AS_PUBLISHED = {
    # Without its head.
    "all-minilm-l6-v2": 770,
    # The head apart from the embedding: vocab_size x d_model.
    "flan-t5-small": -32128 * 512,
    "flan-t5-base": -32128 * 768,
    "flan-t5-large": -32128 * 1024,
    "flan-t5-xl": -32128 * 2048,
    "flan-t5-xxl": -32128 * 4096,
    # The router's biases: 58 mixture layers of 256 experts.
    "deepseek-v3": -58 * 256,
    # Not explained.
    "opt-66b": -3_176_448,
    "stablelm-base-alpha-3b": -1_204_224,
    "stablelm-base-alpha-7b": -602_112,
}


def test_counts_are_the_published_ones() -> None:
    off = {}
    num_compared = 0
    for model in catalog_models().values():
        if model.published_parameters is not None:
            num_compared += 1
            difference = probe_model(model.name).facts.num_parameters - model.published_parameters
            off |= {model.name: difference} if difference else {}
    assert num_compared > 100
    assert off == _NOT_AS_PUBLISHED
    assert all(catalog_models()[name].note for name in off)


@pytest.mark.parametrize(
    ("name", "task", "count"),
    [
        ("bert-large-uncased", Task.SEQUENCE_CLASSIFICATION, 335_143_938),
        ("llama-3-8b", Task.CAUSAL_LM, 8_030_261_248),
        ("mixtral-8x7b", Task.CAUSAL_LM, 46_702_792_704),
        ("qwen2.5-7b", Task.CAUSAL_LM, 7_615_616_512),
        ("gpt2", Task.CAUSAL_LM, 124_439_808),
    ],
)
def test_a_head_counts(name: str, task: Task, count: int) -> None:
    assert catalog_sizes(name)[task].num_parameters == count


@pytest.mark.parametrize(
    "name",
    [
        *("bert-large-uncased", "t5-small", "llama-3-8b", "mixtral-8x7b"),
        *(pytest.param(name, marks=pytest.mark.evidence) for name in _NAMES),
    ],
)
def test_sizes_are_those_of_transformers_own_class(name: str) -> None:
    model = catalog_models()[name]
    assert measure_model(model) == catalog_sizes(name)
    located = LocatedConfig(name=name, config=model.config, origin=ModelOrigin.CATALOG, place="")
    filled: dict[str, Any] = transformers_config(located, trust_remote_code=False).to_dict()
    for task, sizes in catalog_sizes(name).items():
        # Nothing that the facts need is left to transformers' defaults.
        assert facts_of(name, {**filled, **model.config}, task, sizes) == facts_of(
            name, model.config, task, sizes
        )


def test_sizes_read_back_as_they_were_written() -> None:
    text = (_CATALOG / "model_sizes.toml").read_text(encoding="utf-8")
    version = tomllib.loads(text)["transformers"]
    assert render_sizes({name: catalog_sizes(name) for name in _NAMES}, version) == text
