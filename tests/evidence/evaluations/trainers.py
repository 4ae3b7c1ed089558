"""The Trainer of a case, with its model and samples: of a real rank, and of the estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from evaluations.cases import EVAL_BATCH, EVAL_STEP, LENGTH, NUM_BATCHES, SHORT_LENGTH, STEPS, TRAIN_BATCH

if TYPE_CHECKING:
    from evaluations.cases import Case


class Samples:
    """Token ids whose labels are themselves."""

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.full((self._lengths[index],), 5 + index)
        return {"input_ids": ids, "labels": ids}


def make_model(case: Case) -> Any:
    """Return a Llama in fp32, with what trains."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=128,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation="eager")
    model.train()
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if not case.lora:
        return model
    import peft

    adapters = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, adapters)


def evaluated_samples(case: Case) -> Samples:
    """Return the samples that are evaluated: in order, a batch for each rank in turn."""

    num_samples = case.num_ranks * NUM_BATCHES * EVAL_BATCH - case.lacking

    def length(index: int) -> int:
        is_last_rank = index // EVAL_BATCH % case.num_ranks == case.num_ranks - 1
        return SHORT_LENGTH if case.has_lengths and is_last_rank else LENGTH

    return Samples([length(index) for index in range(num_samples)])


def make_trainer(kind: Any, case: Case, model: Any, folder: str, **arguments: Any) -> Any:
    """Return the Trainer of a case.

    Args:
        kind: transformers' Trainer, or a class of its own.
        folder: for its output.
        arguments: more of TrainingArguments.
    """
    from transformers import TrainingArguments

    said = TrainingArguments(
        folder,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=EVAL_STEP,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=TRAIN_BATCH,
        gradient_accumulation_steps=case.accumulation,
        per_device_eval_batch_size=EVAL_BATCH,
        prediction_loss_only=case.keeps == "loss",
        eval_accumulation_steps=case.moves_every,
        eval_do_concat_batches=case.concatenates,
        batch_eval_metrics=case.by_batch,
        **arguments,
    )
    return kind(
        model=model,
        args=said,
        train_dataset=Samples([LENGTH] * TRAIN_BATCH * case.num_ranks * case.accumulation * STEPS),
        eval_dataset=evaluated_samples(case),
        compute_metrics=_no_metrics,
        preprocess_logits_for_metrics=_best_tokens if case.keeps == "reduced" else None,
    )


def _no_metrics(_: Any, compute_result: bool = True) -> dict[str, float]:
    return {}


def _best_tokens(logits: Any, _: Any) -> Any:
    return logits.argmax(-1)
