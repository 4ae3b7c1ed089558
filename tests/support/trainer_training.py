"""Trains tiny models with a Trainer, under a plan or without, in this process."""

from __future__ import annotations

import copyreg
import dataclasses
import runpy
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerators import quiet, settings
from runs import SCRIPTS

from zerofit.training.changes import Changes
from zerofit.training.hooks import install_accelerator, install_trainer
from zerofit.training.settings import AppliedSettings
from zerofit.training.setup.accelerator_arguments import set_number_formats
from zerofit.training.setup.trainer_arguments import install_arguments

TOKENS = runpy.run_path(str(SCRIPTS / "token_trainer.py"))
SPLIT = {"micro_batch_size": 3, "trainer_accumulates": False}
PIECES = {"micro_batch_size": 2, "gradient_accumulation_steps": 4}


def planned_arguments(base: Any, wanted: AppliedSettings, changes: Changes) -> Any:
    """Return a subclass of TrainingArguments under a plan, so that the class itself stays as it is."""

    class PlannedArguments(base):
        def __reduce_ex__(self, protocol: Any) -> Any:  # Trainer pickles its arguments into each checkpoint
            return copyreg._reconstructor, (base, object, None), self.__dict__

    install_arguments(PlannedArguments, wanted, changes)
    return PlannedArguments


def planned_trainer(base: Any, wanted: AppliedSettings, changes: Changes) -> Any:
    """Return a subclass of Trainer under a plan, with an Accelerator of a subclass of its own."""
    from accelerate import Accelerator

    planned = type("Accelerator", (Accelerator,), {})
    install_accelerator(planned, wanted, changes)

    class PlannedTrainer(base):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            self.accelerator.__class__ = planned
            self.accelerator._zerofit_by_script = False
            set_number_formats(wanted, changes)

    install_trainer(PlannedTrainer, wanted, changes)
    return PlannedTrainer


@dataclasses.dataclass(kw_only=True)
class Trained:
    """A run's log, events and samples."""

    log: list[dict[str, float]]
    """Losses, gradient norms and learning rates, and the evaluations."""
    events: Counter[str]
    """How often each event of a callback came."""
    samples: list[set[tuple[int, ...]]]
    """Samples of each optimizer step, told by their tokens."""
    sizes: set[int]
    """Samples of each forward pass in training."""
    trainer: Any
    changes: Changes

    def numbers(self, *names: str) -> list[float]:
        """Return these numbers of each logged step."""
        return [float(line[name]) for line in self.log for name in names if name in line]


def causal_model() -> Any:
    """Return the same untrained model each time; its loss is divided by num_items_in_batch."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


def train_in(
    folder: Path,
    plan: dict[str, Any] | None,
    batches: tuple[int, int],
    *,
    make_model: Callable[[], Any] = TOKENS["tiny_model"],
    base: Any = None,
    arguments: dict[str, Any] | None = None,
    optimizers: Callable[[Any], tuple[Any, Any]] = lambda model: (None, None),
    collate: Any = None,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    **more: Any,
) -> Trained:
    """Train three steps on batches of (samples, accumulation), under a plan or (with None) without."""
    from transformers import Seq2SeqTrainingArguments, Trainer, TrainerCallback

    base = base or Trainer
    changes = quiet()
    arguments_class: Any = Seq2SeqTrainingArguments  # Trainer takes them too
    samples: list[set[tuple[int, ...]]] = [set()]

    class Own(base):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            samples[-1] |= {tuple(token for token in row if token) for row in inputs["input_ids"].tolist()}
            return super().training_step(model, inputs, *args)

    own_class: Any = Own
    if plan is not None:
        wanted = settings(**{"trainer_accumulates": True, **plan})
        arguments_class = planned_arguments(Seq2SeqTrainingArguments, wanted, changes)
        own_class = planned_trainer(Own, wanted, changes)
    events: Counter[str] = Counter()

    class Count(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                events[name] += 1
            return super().__getattribute__(name)

        def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            samples.append(set())

    own = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 1e9, "logging_steps": 1}
    silent = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    made = arguments_class(
        output_dir=str(folder),
        per_device_train_batch_size=batches[0],
        gradient_accumulation_steps=batches[1],
        **{**own, **silent, **(arguments or {})},
    )
    model = make_model()
    sizes: set[int] = set()
    model.get_input_embeddings().register_forward_pre_hook(
        lambda module, inputs: sizes.add(len(inputs[0])) if module.training else None
    )
    trainer = own_class(
        model=model,
        args=made,
        train_dataset=TOKENS["samples"](24),
        eval_dataset=TOKENS["samples"](6),
        data_collator=collate or TOKENS["collator"](),
        optimizers=optimizers(model),
        callbacks=[Count(), *callbacks],
        **more,
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return Trained(
        log=trainer.state.log_history,
        events=events,
        samples=samples,
        sizes=sizes,
        trainer=trainer,
        changes=changes,
    )
