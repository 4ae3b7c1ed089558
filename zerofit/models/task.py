"""Tasks that a model can be trained for, and the task of a config.json."""

from __future__ import annotations

from enum import Enum
from typing import Any


class Task(Enum):
    """The task of a model's head; transformers has one Auto class for each."""

    CAUSAL_LM = "causal-lm"
    SEQ2SEQ_LM = "seq2seq-lm"
    MASKED_LM = "masked-lm"
    SEQUENCE_CLASSIFICATION = "sequence-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    QUESTION_ANSWERING = "question-answering"
    MULTIPLE_CHOICE = "multiple-choice"
    IMAGE_CLASSIFICATION = "image-classification"
    AUDIO_CLASSIFICATION = "audio-classification"
    CTC = "ctc"
    SPEECH_SEQ2SEQ = "speech-seq2seq"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"

    @property
    def auto_class(self) -> str:
        """The name of transformers' Auto class for the task."""
        return f"AutoModelFor{_HEADS[self]}"

    @property
    def mapping(self) -> str:
        """The name of transformers' table from model types to classes for the task."""
        return f"MODEL_FOR_{_MAPPINGS.get(self, self.name)}_MAPPING_NAMES"


_HEADS = {
    Task.CAUSAL_LM: "CausalLM",
    Task.SEQ2SEQ_LM: "Seq2SeqLM",
    Task.MASKED_LM: "MaskedLM",
    Task.SEQUENCE_CLASSIFICATION: "SequenceClassification",
    Task.TOKEN_CLASSIFICATION: "TokenClassification",
    Task.QUESTION_ANSWERING: "QuestionAnswering",
    Task.MULTIPLE_CHOICE: "MultipleChoice",
    Task.IMAGE_CLASSIFICATION: "ImageClassification",
    Task.AUDIO_CLASSIFICATION: "AudioClassification",
    Task.CTC: "CTC",
    Task.SPEECH_SEQ2SEQ: "SpeechSeq2Seq",
    Task.IMAGE_TEXT_TO_TEXT: "ImageTextToText",
}
"""Suffixes of transformers' class names. ForConditionalGeneration is handled in task_of."""
_MAPPINGS = {Task.SEQ2SEQ_LM: "SEQ_TO_SEQ_CAUSAL_LM", Task.SPEECH_SEQ2SEQ: "SPEECH_SEQ_2_SEQ"}
"""Exceptions among transformers' mapping names. Source: transformers 5.23, models/auto/modeling_auto.py."""

_PREFERENCE = (
    Task.CTC,
    Task.SPEECH_SEQ2SEQ,
    Task.IMAGE_TEXT_TO_TEXT,
    Task.SEQ2SEQ_LM,
    Task.IMAGE_CLASSIFICATION,
    Task.CAUSAL_LM,
)
"""Tasks for a model without a head; the first one that its family supports is used."""


def task_of(config: dict[str, Any], available: tuple[Task, ...]) -> tuple[Task, str] | None:
    """Return the task of a config and the reason in words; None if unknown.

    The head in the config's `architectures` comes first. Without one, or with one only for pretraining, the
    task is the usual one of its family: sequence classification for an encoder.

    Args:
        available: the tasks that transformers has a class for in this family.
    """
    for architecture in config.get("architectures") or ():
        named = _task_named(architecture, config)
        if named is Task.SEQUENCE_CLASSIFICATION and named not in available:
            named = Task.AUDIO_CLASSIFICATION  # wav2vec 2.0's class for it has that name too
        if named in available:
            return named, f"the config's architectures include {architecture}"
    family = config.get("model_type", "")
    if Task.MASKED_LM in available and Task.SEQ2SEQ_LM not in available and Task.CTC not in available:
        first = Task.SEQUENCE_CLASSIFICATION if Task.SEQUENCE_CLASSIFICATION in available else Task.MASKED_LM
        return first, f"the config's architectures name no task head, and {family} is an encoder"
    for task in (*_PREFERENCE, *available):
        if task in available:
            return task, f"the config's architectures name no task head; this is the usual task of {family}"
    return None


def _task_named(architecture: str, config: dict[str, Any]) -> Task | None:
    if architecture.endswith("ForConditionalGeneration"):
        if "vision_config" in config:
            return Task.IMAGE_TEXT_TO_TEXT
        return Task.SPEECH_SEQ2SEQ if "num_mel_bins" in config else Task.SEQ2SEQ_LM
    if architecture.endswith("LMHeadModel"):
        return Task.CAUSAL_LM
    return next((task for task, head in _HEADS.items() if architecture.endswith(f"For{head}")), None)
