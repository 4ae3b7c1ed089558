"""probe_model: every way to name a model, its facts and head, and what is said where it can't be used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.core.facts import ModelFacts, parameters
from zerofit.models.dimensions import check_sequence_length, longer_note
from zerofit.models.find import probe_model
from zerofit.models.meta_device import transformers_config
from zerofit.models.source import LocatedConfig, ModelOrigin
from zerofit.models.task import Task, task_of

_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_LAYER = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64
_LLAMA_FACTS = ModelFacts(
    name="",
    model_type="llama",
    num_parameters=2 * 1000 * 64 + 2 * _LAYER + 64,
    num_trainable_parameters=2 * 1000 * 64 + 2 * _LAYER + 64,
    num_layers=2,
    hidden_size=64,
    vocab_size=1000,
    max_sequence_length=256,
    has_rotary_positions=True,
    architecture="LlamaForCausalLM",
    intermediate_size=160,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    is_gated=True,
    is_causal=True,
    num_largest_layer_parameters=_LAYER,
    largest_parameter=64_000,
    checkpoint_dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and a hub that must not be asked."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return folder


def _folder(path: Path, config: Any, name: str = "config.json") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / name).write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return path


def _renamed(facts: ModelFacts, name: str) -> ModelFacts:
    import dataclasses

    return dataclasses.replace(facts, name=name)


@pytest.mark.parametrize("is_fast", [False, True])
def test_a_folder_and_its_config_are_the_same_model(tmp_path: Path, is_fast: bool) -> None:
    folder = _folder(tmp_path / "m", _LLAMA)
    for text, origin in (
        (str(folder), ModelOrigin.FOLDER),
        (str(folder / "config.json"), ModelOrigin.FILE),
    ):
        source = probe_model(text, is_fast=is_fast)
        assert source.facts == _renamed(_LLAMA_FACTS, text)
        assert (source.origin, source.place, source.task) == (origin, str(folder), Task.CAUSAL_LM)
        assert source.config == _LLAMA


def test_a_hub_id_in_the_cache_is_read_from_there(cache: Path) -> None:
    repository = cache / "models--me--mine"
    _folder(repository / "snapshots" / "0123", _LLAMA)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    source = probe_model("me/mine")
    assert source.facts == _renamed(_LLAMA_FACTS, "me/mine")
    assert (source.origin, source.place) == (ModelOrigin.CACHE, "me/mine")


def test_of_a_hub_id_the_config_alone_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = _folder(tmp_path / "there", _LLAMA)
    asked = []

    def download(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(folder / file)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    source = probe_model("me/mine")
    assert asked == [("me/mine", "config.json")]
    assert (source.origin, source.facts.num_parameters) == (ModelOrigin.HUB, _LLAMA_FACTS.num_parameters)


def test_a_folder_comes_before_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _folder(tmp_path / "gpt2", _LLAMA)
    monkeypatch.chdir(tmp_path)
    assert probe_model("gpt2").facts.model_type == "llama"


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("bert-base-uncased", 512),
        ("roberta-base", 512),
        ("xlm-roberta-large", 512),
        ("deberta-v3-base", None),
        ("distilbert-base-uncased", 512),
        ("t5-base", None),
        ("bart-large", 1024),
        ("gpt2", 1024),
        ("opt-125m", 2048),
        ("gpt-j-6b", 2048),
        ("bloom-560m", None),
        ("falcon-7b", 2048),
        ("llama-2-7b", 4096),
        ("llama-3.1-8b", 131072),
        ("vit-base", 197),
        ("whisper-large-v3", 448),
    ],
)
def test_the_longest_sequence_is_what_the_positions_hold(name: str, longest: int | None) -> None:
    assert probe_model(name).facts.max_sequence_length == longest


def test_facts_of_other_shapes() -> None:
    t5, falcon = probe_model("flan-t5-large").facts, probe_model("falcon-7b").facts
    assert (t5.num_layers, t5.num_decoder_layers, t5.is_gated, t5.is_causal) == (48, 24, True, False)
    assert (falcon.num_attention_heads, falcon.num_key_value_heads, falcon.head_dim) == (71, 1, 64)
    deepseek = probe_model("deepseek-v3").facts
    assert (deepseek.num_experts, deepseek.num_experts_per_token, deepseek.head_dim) == (256, 8, 192)
    assert deepseek.intermediate_size == 2048
    whisper = probe_model("whisper-tiny").facts
    # The encoder's sinusoidal positions get no gradients.
    assert whisper.num_parameters - whisper.num_trainable_parameters == 1500 * 384


_BERT = {
    "model_type": "bert",
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


@pytest.mark.parametrize(
    ("config", "task", "expected", "architecture", "reason"),
    [
        (
            {**_BERT, "architectures": ["BertForMaskedLM"]},
            None,
            Task.MASKED_LM,
            "BertForMaskedLM",
            "the config's architectures include BertForMaskedLM",
        ),
        (
            {**_BERT, "architectures": ["BertModel"]},
            None,
            Task.SEQUENCE_CLASSIFICATION,
            "BertForSequenceClassification",
            "the config's architectures name no task head, and bert is an encoder",
        ),
        (
            {**_BERT, "architectures": ["BertForMaskedLM"]},
            Task.TOKEN_CLASSIFICATION,
            Task.TOKEN_CLASSIFICATION,
            "BertForTokenClassification",
            "--task token-classification",
        ),
        (
            {**_LLAMA, "architectures": ["LlamaModel"]},
            None,
            Task.CAUSAL_LM,
            "LlamaForCausalLM",
            "the config's architectures name no task head; this is the usual task of llama",
        ),
    ],
)
@pytest.mark.parametrize("is_fast", [False, True])
def test_the_head_comes_from_the_task_or_the_architectures(
    tmp_path: Path,
    config: dict[str, Any],
    task: Task | None,
    expected: Task,
    architecture: str,
    reason: str,
    is_fast: bool,
) -> None:
    source = probe_model(str(_folder(tmp_path / "m", config)), task=task, is_fast=is_fast)
    assert (source.task, source.facts.architecture) == (expected, architecture)
    assert source.task_reason == reason


def test_what_no_key_says_is_counted_on_the_model(tmp_path: Path) -> None:
    sizes = {"hidden_sizes": [8, 16], "depths": [2, 3], "num_stages": 2}
    config = {"model_type": "convnext", "architectures": ["ConvNextForImageClassification"], **sizes}
    source = probe_model(str(_folder(tmp_path / "m", config)))
    facts = source.facts
    assert (facts.num_layers, facts.hidden_size, facts.vocab_size) == (3, 0, 0)
    assert not source.can_checkpoint


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        ("Wav2Vec2ForCTC", Task.CTC),
        ("Wav2Vec2ForSequenceClassification", Task.AUDIO_CLASSIFICATION),
        ("Wav2Vec2ForPreTraining", Task.CTC),
    ],
)
def test_a_speech_encoder_is_trained_for_text_or_classes(architecture: str, expected: Task) -> None:
    config = {"model_type": "wav2vec2", "architectures": [architecture]}
    found = task_of(config, (Task.AUDIO_CLASSIFICATION, Task.CTC))
    assert found is not None
    assert found[0] is expected


def test_what_a_config_leaves_out_is_transformers_default(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", {"model_type": "gpt2"})
    assert probe_model(str(folder)).facts.num_parameters == 124_439_808


def _stored(folder: Path, *dtypes: str, **config: Any) -> ModelFacts:
    """Return the facts of a model whose folder has a safetensors file with a tensor of each dtype."""
    import torch
    from safetensors.torch import save_file

    _folder(folder, {**_LLAMA, "dtype": None, **config})
    if dtypes:
        tensors = {
            str(number): torch.zeros(2, dtype=getattr(torch, one)) for number, one in enumerate(dtypes)
        }
        save_file(tensors, folder / "model.safetensors")
    return probe_model(str(folder), is_fast=True).facts


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("bfloat16",), "bfloat16"),
        (("float16", "float16"), "float16"),
        (("int64", "float32"), "float32"),
        (("int8",), ""),
        ((), ""),
    ],
)
def test_the_dtype_is_that_of_the_first_floating_tensor_where_the_config_names_none(
    tmp_path: Path, dtypes: tuple[str, ...], expected: str
) -> None:
    assert _stored(tmp_path / "m", *dtypes).checkpoint_dtype == expected
    assert _stored(tmp_path / "n", *dtypes, dtype="float64").checkpoint_dtype == "float64"


def test_fast_counts_the_stored_tensors(tmp_path: Path) -> None:
    facts = _stored(tmp_path / "m", "bfloat16", "float16", "int8", model_type="phi3")
    assert (facts.num_parameters, facts.largest_parameter, facts.hidden_size) == (6, 2, 64)


@pytest.mark.parametrize("weights", [None, "version https://git-lfs", "\x02" + 7 * "\0" + "[]"])
def test_fast_counts_on_the_models_class_where_no_stored_weights_can_be_read(
    tmp_path: Path, weights: str | None
) -> None:
    folder = _folder(tmp_path / "m", _LLAMA)
    if weights is not None:
        _folder(folder, weights, "model.safetensors")
    assert probe_model(str(folder), is_fast=True).facts == _renamed(_LLAMA_FACTS, str(folder))


def test_a_note_of_the_catalog_is_shown() -> None:
    assert "the Qwen2 class" in probe_model("Qwen/Qwen-7B").note
    assert probe_model("gpt2").note == ""


_REMOTE_CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel
import torch
Path({ran!r}).touch()

class OwnConfig(PretrainedConfig):
    model_type = "own"

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.skips = torch.nn.ModuleList([None, None])
        self.post_init()

    def _init_weights(self, module):
        pass
"""
_REMOTE_CONFIG = {
    "model_type": "own",
    "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    "hidden_size": 8,
    "num_hidden_layers": 3,
}


def test_remote_code_runs_only_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    ran = tmp_path / "ran"
    folder = _folder(tmp_path / "m", _REMOTE_CONFIG)
    _folder(folder, _REMOTE_CODE.format(ran=str(ran)), "own.py")
    with pytest.raises(UserError) as raised:
        probe_model(str(folder))
    assert not ran.exists()
    assert str(raised.value) == (
        "error[model-needs-remote-code]: this model needs its own Python code, which zerofit does not run "
        "unasked\n"
        f"  found: auto_map in the config of {folder}; transformers has no class for own\n"
        "  why:   such code can do anything on this machine\n"
        "  fix:   read that code; if you trust it, add --trust-remote-code\n"
        "  see:   https://huggingface.co/docs/transformers/models#custom-models"
    )
    source = probe_model(str(folder), trust_remote_code=True)
    assert ran.exists()
    assert (source.facts.num_parameters, source.facts.num_largest_layer_parameters) == (3 * 72, 72)
    assert source.facts.architecture == "OwnModel"


@pytest.mark.parametrize("model_type", ["own", "bert"])
@pytest.mark.parametrize("key", [None, "_name_or_path", "name_or_path"])
def test_the_code_that_was_trusted_runs_wherever_the_config_once_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str | None, model_type: str
) -> None:
    """Transformers' own family (bert) with one class of the model's own, and a family all of its own."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    config = {**_BERT, **_REMOTE_CONFIG, "model_type": model_type}
    if model_type == "bert":
        config["auto_map"] = {"AutoModelForSequenceClassification": "own.OwnModel"}
    elsewhere = tmp_path / f"elsewhere_{model_type}_{key}"
    folder = _folder(tmp_path / f"here_{model_type}_{key}", config | ({key: str(elsewhere)} if key else {}))
    for place, ran in ((folder, right), (elsewhere, wrong)):
        code = _REMOTE_CODE.format(ran=str(ran))
        if model_type == "bert":
            code = code.replace("= OwnConfig", "= __import__('transformers').BertConfig")
        _folder(place, code, "own.py")
    task = Task.SEQUENCE_CLASSIFICATION if model_type == "bert" else Task.CAUSAL_LM
    source = probe_model(str(folder), task=task, trust_remote_code=True)
    assert source.facts.architecture == "OwnModel"
    assert right.exists()
    assert not wrong.exists()


@pytest.mark.parametrize(
    "reference",
    ["other/repo--own.OwnModel", "../elsewhere--own.OwnModel", "{elsewhere}/own.OwnModel", "own", 3],
)
@pytest.mark.parametrize("auto_class", ["AutoConfig", "AutoModelForCausalLM"])
def test_code_outside_of_the_trusted_place_is_refused(
    tmp_path: Path, auto_class: str, reference: object
) -> None:
    ran = tmp_path / "ran"
    elsewhere = _folder(tmp_path / "elsewhere", _REMOTE_CODE.format(ran=str(ran)), "own.py")
    if isinstance(reference, str):
        reference = reference.format(elsewhere=elsewhere)
    auto_map = {"AutoConfig": "own.OwnConfig", auto_class: reference}
    folder = _folder(tmp_path / "m", {**_REMOTE_CONFIG, "auto_map": auto_map})
    with pytest.raises(UserError) as raised:
        probe_model(str(folder), trust_remote_code=True)
    assert str(raised.value) == (
        "error[model-code-elsewhere]: the config refers to code elsewhere, which zerofit does not run\n"
        f"  found: auto_map of {folder}: {auto_class} is {json.dumps(reference)}\n"
        f"  why:   --trust-remote-code only trusts the files of {folder}\n"
        "  fix:   copy the code beside config.json, read it, and write FILE.CLASS there\n"
        "  see:   https://huggingface.co/docs/transformers/models#custom-models"
    )
    assert not ran.exists()


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_no_part_of_a_config_leads_elsewhere(tmp_path: Path, trust_remote_code: bool) -> None:
    away = {"_name_or_path": "other/repo", "attn_implementation": "other/kernels"}
    text = {"hidden_size": 64, "auto_map": {"AutoModel": "other/repo--own.OwnModel"}, **away}
    located = LocatedConfig(
        name="m",
        config={"model_type": "gemma3", "text_config": text, **away},
        origin=ModelOrigin.FOLDER,
        place=str(tmp_path),
    )
    config = transformers_config(located, trust_remote_code=trust_remote_code)
    assert config.text_config.hidden_size == 64
    assert not hasattr(config.text_config, "auto_map")
    assert (config.name_or_path, config.text_config.name_or_path) == (str(tmp_path), "")
    assert "other/" not in str(config) + str(vars(config)) + str(vars(config.text_config))


@pytest.mark.parametrize("task", [None, Task.IMAGE_CLASSIFICATION])
def test_a_head_that_only_code_of_its_own_has_is_no_head_unasked(tmp_path: Path, task: Task | None) -> None:
    head = {"AutoModelForImageClassification": "own.OwnModel"}
    named = {"architectures": ["OwnForImageClassification"], "auto_map": head}
    folder = _folder(tmp_path / "m", {**_BERT, **named})
    with pytest.raises(UserError) as raised:
        probe_model(str(folder), task=task)
    assert raised.value.rule == "model-needs-remote-code"
    assert raised.value.found == (
        f"auto_map in the config of {folder}; transformers has no image-classification class for bert"
    )
    assert probe_model(str(folder), task=Task.MASKED_LM).facts.architecture == "BertForMaskedLM"


def test_a_model_of_text_and_images_has_the_dimensions_of_its_text(tmp_path: Path) -> None:
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 3},
        "vision_config": {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2},
    }
    source = probe_model(str(_folder(tmp_path / "m", config)))
    assert source.task is Task.IMAGE_TEXT_TO_TEXT
    # 262,208 tokens, 8 heads and 131,072 positions are transformers' defaults.
    assert (source.facts.hidden_size, source.facts.num_layers, source.facts.vocab_size) == (64, 3, 262208)
    assert (source.facts.num_attention_heads, source.facts.max_sequence_length) == (8, 131072)


@pytest.mark.parametrize(
    ("name", "sequence_length", "target_length", "flag"),
    [
        ("bert-base-uncased", 512, None, None),
        ("bert-base-uncased", 513, None, "--seq-len 513"),
        ("roberta-base", 513, None, "--seq-len 513"),
        ("bert-base-uncased", 512, 600, None),  # no decoder: a target's length means nothing
        ("bart-large", 512, 1025, "--target-len 1025"),
        ("t5-base", 10**6, 10**6, None),
        ("vit-base", 10**6, None, None),
        ("gpt2", None, None, None),
        ("gpt-j-6b", 2049, None, "--seq-len 2049"),  # rotary, from a table of 2048 places
        ("llama-2-7b", 8192, None, None),
    ],
)
def test_samples_and_targets_must_fit_the_positions(
    name: str, sequence_length: int | None, target_length: int | None, flag: str | None
) -> None:
    facts = probe_model(name).facts
    if flag is None:
        check_sequence_length(facts, sequence_length, target_length)
        return
    with pytest.raises(UserError) as caught:
        check_sequence_length(facts, sequence_length, target_length)
    most = facts.max_sequence_length
    assert str(caught.value) == (
        "error[sequence-too-long]: the samples are longer than the model's positions\n"
        f"  found: {flag} with the model {name}\n"
        f"  why:   it has {most} positions; beyond them it fails or trains nonsense\n"
        f"  fix:   set {flag.split()[0]} to {most} or less"
    )


@pytest.mark.parametrize(
    ("name", "sequence_length", "is_told"),
    [
        ("llama-2-7b", 4096, False),
        ("llama-2-7b", 4097, True),
        ("gpt2", 2048, False),
        ("t5-base", 10**6, False),
    ],
)
def test_samples_beyond_rotary_positions_are_told(name: str, sequence_length: int, is_told: bool) -> None:
    note = longer_note(probe_model(name).facts, sequence_length)
    assert bool(note) == is_told
    assert not is_told or note.startswith(
        "samples of 4097 tokens are longer than the 4096 positions of llama-2-7b"
    )


@pytest.mark.parametrize("model_type", ["cohere2", "gpt_oss", "olmo2", "glm4", "smollm3", "granite"])
def test_families_with_rope_parameters_are_rotary(model_type: str, tmp_path: Path) -> None:
    from transformers import CONFIG_MAPPING

    CONFIG_MAPPING[model_type](num_hidden_layers=1).save_pretrained(tmp_path)
    assert probe_model(str(tmp_path)).facts.has_rotary_positions


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (124_439_808, "124 M"),
        (999_499_999, "999 M"),
        (999_885_952, "1 B"),
        (1_000_000_000, "1 B"),
        (8_030_261_248, "8.03 B"),
        (70_553_706_496, "70.6 B"),
        (671_026_419_200, "671 B"),
        (1_026_000_000_000, "1030 B"),
        (999_900, "1 M"),
        (52_000, "0.052 M"),
    ],
)
def test_number_of_parameters_in_words(number: int, words: str) -> None:
    assert parameters(replace(_LLAMA_FACTS, num_parameters=number)) == words
