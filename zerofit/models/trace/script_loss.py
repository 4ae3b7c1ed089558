"""ScriptLoss: the loss and the predictions of a script's Trainer, with all forward passes in them."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import leave_inputs_in_place
from zerofit.models.trace.prepare import attribute_replaced, autocast, upcast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import TraceRequest


@dataclass(slots=True)
class ScriptLoss:
    """A Trainer's compute_loss() or prediction_step(), run on copies without values of all its models.

    A preference loss calls a frozen reference model beside the trained one, and keeps its own tensors until
    the backward pass. The trained model's forward pass shows neither.
    """

    trainer: Any
    """transformers' Trainer, or an object with its compute_loss()."""
    model: Any
    """The Trainer's trained model, unwrapped."""
    others: tuple[Any, ...] = ()
    """Copies of the Trainer's other modules; set by bind()."""
    stand_in: Any = None
    """A copy of the Trainer that has copies of its models; set by bind()."""
    keeps_predictions: bool = False
    """True if the Trainer keeps the predictions of what it evaluates."""

    def bind(self, model: Any, copied: Callable[..., Any]) -> None:
        """Bind the loss to a copy of the model.

        Args:
            model: the copy.
            copied: copies another module without its values; known= maps ids of objects to replacements.
        """
        self.stand_in = copy.copy(self.trainer)
        others = []
        for name, value in vars(self.trainer).items():
            if name in ("model", "model_wrapped"):
                setattr(self.stand_in, name, model)
            elif hasattr(value, "named_parameters"):
                other = copied(value, known={id(self.model): model})
                setattr(self.stand_in, name, other)
                others.append(other)
        self.others = tuple(others)

    def compute(self, model: Any, inputs: Any, request: TraceRequest) -> Any:
        """Return the loss; under autocast each model runs as accelerate prepares it, with outputs in fp32."""
        with self._prepared(model, request):
            return self.stand_in.compute_loss(model, inputs)

    def predict(self, model: Any, inputs: Any, request: TraceRequest) -> tuple[Any, ...]:
        """Do what the Trainer does with a batch that it evaluates, and return what it keeps of it.

        Source: transformers 5.23, trainer.py, evaluation_loop().

        Raises:
            UserError: it generates, as with predict_with_generate.
        """
        trainer, keeps = self.stand_in, self.keeps_predictions
        leave_inputs_in_place(trainer)
        with self._prepared(model, request), _refusing_to_generate(model):
            _, logits, labels = trainer.prediction_step(model, inputs, not keeps)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        wanted = getattr(trainer.args, "include_for_metrics", None) or ()
        name = getattr(trainer.model, "main_input_name", "input_ids")
        return (logits, labels, inputs[name] if "inputs" in wanted else None) if keeps else ()

    @contextmanager
    def _prepared(self, model: Any, request: TraceRequest) -> Iterator[None]:
        """Let all models run as accelerate prepares them."""
        prepared = [other for other in self.others if all(inner is not model for inner in other.modules())]
        with ExitStack() as stack:
            for other in (model, *prepared) if request.autocast is not None else ():
                stack.enter_context(_autocasting(other, request))
            yield


@contextmanager
def _autocasting(module: Any, request: TraceRequest) -> Iterator[None]:
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with autocast(request):
            outputs = forward(*args, **kwargs)
        return upcast(outputs)

    with attribute_replaced(module, "forward", run):
        yield


@contextmanager
def _refusing_to_generate(model: Any) -> Iterator[None]:
    """Refuse generate(): without values it ends after a token, whose memory would pass for that of all."""
    if not hasattr(model, "generate"):
        yield
        return

    def refuse(*_: Any, **__: Any) -> Any:
        raise UserError(
            "trace-failed",
            "evaluation generates text",
            found=f"{type(model).__name__}.generate() in prediction_step(), as with predict_with_generate",
            why="how many tokens it generates depends on values, which a trace does not have",
            fix="leave memory for it with --reserve, or plan its generation with zerofit generate --dry-run",
        )

    with attribute_replaced(model, "generate", refuse):
        yield
