"""Words and patterns for what does not train, resolved to names."""

from __future__ import annotations

import pytest

from zerofit.core.freezing import frozen_names, num_frozen_blocks, stacks_of

BERT = (
    "bert.embeddings.word_embeddings.weight",
    "bert.embeddings.LayerNorm.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
    "bert.encoder.layer.1.attention.self.query.weight",
    "bert.encoder.layer.2.attention.self.query.weight",
    "bert.pooler.dense.weight",
    "classifier.dense.weight",
    "classifier.out_proj.weight",
)
T5 = (
    "shared.weight",
    "encoder.block.0.layer.0.SelfAttention.q.weight",
    "encoder.block.1.layer.0.SelfAttention.q.weight",
    "encoder.final_layer_norm.weight",
    "decoder.block.0.layer.0.SelfAttention.q.weight",
    "decoder.block.1.layer.1.EncDecAttention.q.weight",
    "lm_head.weight",
)
MIXTURE = (
    "model.embed_tokens.weight",
    "model.layers.0.mlp.up_proj.weight",
    "model.layers.1.mlp.experts.0.w1.weight",
    "model.layers.1.mlp.experts.1.w1.weight",
    "model.norm.weight",
    "lm_head.weight",
)
SENTENCE = (
    "0.auto_model.embeddings.word_embeddings.weight",
    "0.auto_model.encoder.layer.0.output.dense.weight",
    "0.auto_model.encoder.layer.1.output.dense.weight",
    "2.linear.weight",
)


@pytest.mark.parametrize(
    ("names", "freeze", "base_prefix", "trains"),
    [
        (BERT, ("embeddings",), "bert", BERT[2:]),
        (BERT, ("embeddings+2",), "bert", BERT[4:]),
        (BERT, ("blocks",), "bert", (*BERT[:2], *BERT[5:])),
        (BERT, ("all-but-head",), "bert", BERT[6:]),
        (BERT, ("all-but-head",), None, BERT[6:]),
        (BERT, ("*.query.weight",), "bert", (*BERT[:2], *BERT[5:])),
        (BERT, ("embeddings", "classifier.*"), "bert", BERT[2:6]),
        (BERT[:6], ("all-but-head",), "", ()),
        (T5, ("embeddings+1",), None, (T5[2], T5[3], T5[5], T5[6])),
        (T5, ("all-but-head",), "transformer", ("lm_head.weight",)),
        (MIXTURE, ("embeddings+1",), "model", MIXTURE[2:]),
        (MIXTURE, ("all-but-head",), "model", ("lm_head.weight",)),
        (SENTENCE, ("embeddings+1",), None, SENTENCE[2:]),
        (("model.layers.0.mlp.up.weight",), ("embeddings+1",), "model", ()),
        (("head.weight",), ("all-but-head",), "model", ("head.weight",)),
        (BERT, (), "bert", BERT),
    ],
)
def test_what_is_left_to_train(
    names: tuple[str, ...], freeze: tuple[str, ...], base_prefix: str | None, trains: tuple[str, ...]
) -> None:
    frozen = frozen_names(names, freeze, base_prefix=base_prefix)
    assert tuple(name for name in names if name not in frozen) == trains


@pytest.mark.parametrize(
    ("names", "stacks"),
    [
        (BERT, {"bert.encoder.layer": 3}),
        (T5, {"encoder.block": 2, "decoder.block": 2}),
        (MIXTURE, {"model.layers": 2}),
        (SENTENCE, {"0.auto_model.encoder.layer": 2}),
        (("trunk.0.fc.weight", "trunk.1.fc.weight"), {"trunk": 2}),
        (("net.0.weight", "net.2.weight"), {}),
    ],
)
def test_stacks_are_found_by_their_names(names: tuple[str, ...], stacks: dict[str, int]) -> None:
    assert stacks_of(names) == stacks


@pytest.mark.parametrize(
    ("word", "number"),
    [
        ("embeddings", 0),
        ("embeddings+12", 12),
        ("embeddings+", None),
        ("all-but-head", None),
        ("*.h.*", None),
    ],
)
def test_blocks_that_a_word_freezes(word: str, number: int | None) -> None:
    assert num_frozen_blocks(word) == number
