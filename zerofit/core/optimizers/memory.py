"""OptimizerMemory: the states that an optimizer keeps per parameter, and the temporaries of its step.

Read at torch 2.13.0, transformers 5.23.0, bitsandbytes 0.50.2 and torchao 0.18.0; tests run the real classes
beside it (tests/planning/estimate/test_optimizers.py, tests/models/trace/test_optimizer_step.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Temporaries(StrEnum):
    """What a step allocates on the GPU beside the states, and frees again."""

    NONE = "none"
    """It steps in place."""
    ALL_AT_ONCE = "one tensor for each parameter, all at once"
    """torch's foreach: the roots of second moments (torch/optim/adam.py, _multi_tensor_adam), or gradients
    with the weights' decay (sgd.py, _multi_tensor_sgd)."""
    ONE_BY_ONE = "one tensor at a time, as large as the parameter"
    """A gradient with its weight's decay (torch/optim/sgd.py, _single_tensor_sgd)."""
    ADAFACTOR = "fp32 copies and updates, parameter by parameter"
    """transformers/optimization.py, Adafactor.step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Quantized states: blocks of elements share one fp32 scale."""

    bits: int
    """Of one element."""
    num_elements: int
    """Elements that share a scale."""
    least_elements: int = 4096
    """Smaller tensors keep unquantized states."""
    table_bytes: int = 0
    """Of each code table, which all parameters share; one for each state."""
    own_table_bytes: int = 0
    """Of the code table that each state of each parameter has for itself."""
    divides: bool = False
    """True if tensors that are not a multiple of a block keep unquantized states."""
    keeps_embeddings: bool = False
    """True if embeddings keep fp32 states: with 8 bits they are unstable (transformers/trainer.py,
    create_optimizer)."""

    def quantizes(self, num_elements: int, *, is_embedding: bool) -> bool:
        """Return True if a parameter of this size has quantized states."""
        is_whole = not self.divides or num_elements % self.num_elements == 0
        is_left_out = self.keeps_embeddings and is_embedding
        return num_elements >= self.least_elements and is_whole and not is_left_out


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The states that one optimizer keeps per parameter, and the bytes that its step moves."""

    formula: str
    """Of the states of P elements, b bytes each."""
    source: str
    least_bytes: int
    """Lower bound of the state bytes per element: two moments in fp32 or in 8 bit. 0 for Adafactor, which
    keeps sums over rows and columns, SGD without momentum, and states in pages that may leave the GPU."""
    step_bytes: int
    """Bytes read and written per stepped element, with fp32 weights and gradients. Those of torch and
    transformers are counted over the operators of a real step (tests/planning/estimate/test_optimizers.py),
    except fused AdamW, which reads weight, gradient and two moments and writes three; 8-bit moments take one
    byte each way each; Lion has one moment. ASSUMPTION: pages stay on the GPU from step to step; those that
    the driver has moved take longer, by how much was not measured."""
    step_bytes_16bit: int
    """The same with weights and gradients in 16 bit, which Adafactor steps in fp32 copies."""
    dispatches: float
    """CPU time of stepping one parameter, in operator dispatches; chosen like _MODULE_DISPATCHES of
    step_time.py."""
    like_parameter: int = 0
    """States as wide as the parameter."""
    in_fp32: tuple[int, ...] = ()
    """States in fp32, whatever the parameter's format, each in elements per element of the parameter; in
    blocks where `blocks` says so."""
    scalar_bytes: int = 0
    """Of counters on the GPU."""
    is_factored: bool = False
    """True if second moments are factored into rows and columns: Adafactor."""
    blocks: Blocks | None = None
    """How states are quantized; None if they are not."""
    is_paged: bool = False
    """True if states of large tensors lie in pages that the driver may move to the host."""
    offloads_from: int | None = None
    """Parameters of at least so many elements have their states, a copy and a gradient in host memory."""
    temporaries: Temporaries = Temporaries.NONE

    @property
    def has_8_bit(self) -> bool:
        """True if DeepSpeed's flat buffers are cut so that embeddings keep fp32 states."""
        return self.blocks is not None and self.blocks.keeps_embeddings


_PAGES = (
    "; of tensors from 100000 elements on they lie in unified memory, in pages that the driver moves to the "
    "host when the GPU is full: those of one tensor at a time are counted"
)
_PAGED = "bitsandbytes/optim/optimizer.py, get_state_buffer; ASSUMPTION: the driver makes room in time"
LEAST_PAGED = 100_000
"""A paged optimizer pages the states of no smaller tensor (bitsandbytes/optim/optimizer.py,
get_state_buffer)."""
_ONE_STATE = "bitsandbytes/optim/optimizer.py, Optimizer1State.init_state"
_EIGHT_BITS = Blocks(bits=8, num_elements=256, table_bytes=256 * 4, keeps_embeddings=True)
"""bitsandbytes/optim/optimizer.py: init_state, min_8bit_size and fill_qmap."""


def paged(memory: OptimizerMemory, formula: str) -> OptimizerMemory:
    """Return the memory of an optimizer with paged states, which the driver may move to the host."""
    return replace(memory, formula=f"{formula}{_PAGES}", source=_PAGED, least_bytes=0, is_paged=True)


FOREACH_ADAMW = OptimizerMemory(
    formula="2 b P",
    source="torch/optim/adam.py, _init_group: exp_avg and exp_avg_sq like each parameter",
    least_bytes=8,
    step_bytes=84,
    step_bytes_16bit=42,
    dispatches=0.5,
    like_parameter=2,
    temporaries=Temporaries.ALL_AT_ONCE,
)
"""torch's AdamW as it runs on CUDA by default; stands for an optimizer that is not known."""
FUSED_ADAMW = OptimizerMemory(
    formula="2 b P + 4 B a parameter",
    source="torch/optim/adam.py, _init_group: exp_avg and exp_avg_sq; fused keeps the step on the GPU",
    least_bytes=8,
    step_bytes=28,
    step_bytes_16bit=14,
    dispatches=0.5,
    like_parameter=2,
    scalar_bytes=4,
)
ADAMW_8BIT = OptimizerMemory(
    formula="2 P + 8 P / 256; 8 P for embeddings and tensors below 4096 elements",
    source="bitsandbytes/optim/optimizer.py, init_state; transformers/trainer.py, create_optimizer",
    least_bytes=2,
    step_bytes=16,
    step_bytes_16bit=10,
    dispatches=4,
    in_fp32=(1, 1),
    blocks=_EIGHT_BITS,
)
ADAMW_32BIT = replace(ADAMW_8BIT, formula="8 P", step_bytes=28, step_bytes_16bit=22, blocks=None)
PAGED_ADAMW = paged(ADAMW_32BIT, "8 P")
PAGED_ADAMW_8BIT = paged(ADAMW_8BIT, "as 8-bit AdamW")
LION = OptimizerMemory(
    formula="4 P",
    source=_ONE_STATE,
    least_bytes=4,
    step_bytes=20,
    step_bytes_16bit=14,
    dispatches=4,
    in_fp32=(1,),
)
LION_8BIT = OptimizerMemory(
    formula="P + 4 P / 256; 4 P for embeddings and tensors below 4096 elements",
    source=_ONE_STATE,
    least_bytes=1,
    step_bytes=14,
    step_bytes_16bit=8,
    dispatches=4,
    in_fp32=(1,),
    blocks=_EIGHT_BITS,
)
"""Lion's, and those of all of bitsandbytes' optimizers with one state."""
PAGED_LION_8BIT = paged(LION_8BIT, "as 8-bit Lion")
_ADEMAMIX_SOURCE = "bitsandbytes/optim/ademamix.py, init_state: two first moments in one buffer, and a second"
ADEMAMIX = replace(
    ADAMW_32BIT,
    formula="12 P",
    source=_ADEMAMIX_SOURCE,
    least_bytes=12,
    step_bytes=36,
    step_bytes_16bit=30,
    in_fp32=(2, 1),
)
ADEMAMIX_8BIT = replace(
    ADAMW_8BIT,
    formula="3 P + 12 P / 256; 12 P for embeddings and tensors below 4096 elements",
    source=_ADEMAMIX_SOURCE,
    least_bytes=3,
    step_bytes=18,
    step_bytes_16bit=12,
    in_fp32=(2, 1),
)
PAGED_ADEMAMIX = paged(ADEMAMIX, "12 P")
PAGED_ADEMAMIX_8BIT = paged(ADEMAMIX_8BIT, "as 8-bit AdEMAMix")
ADAFACTOR = OptimizerMemory(
    formula="4 (rows + columns) a matrix, 4 P of a vector",
    source="transformers/optimization.py, Adafactor.step",
    least_bytes=0,
    step_bytes=84,
    step_bytes_16bit=104,
    dispatches=10,
    scalar_bytes=4,
    is_factored=True,
    temporaries=Temporaries.ADAFACTOR,
)
SGD = OptimizerMemory(
    formula="0",
    source="torch/optim/sgd.py: without momentum, as Trainer runs it",
    least_bytes=0,
    step_bytes=24,
    step_bytes_16bit=12,
    dispatches=0.5,
    temporaries=Temporaries.ONE_BY_ONE,
)
ONE_STATE = OptimizerMemory(
    formula="b P",
    source="torch/optim/sgd.py: momentum_buffer like each parameter; others keep as much",
    least_bytes=4,
    step_bytes=44,
    step_bytes_16bit=22,
    dispatches=0.5,
    like_parameter=1,
    temporaries=Temporaries.ALL_AT_ONCE,
)
"""RMSprop, Adagrad, SGD with momentum and weight decay."""
MOMENTUM = OptimizerMemory(
    formula="b P",
    source="torch/optim/sgd.py: momentum_buffer like each parameter",
    least_bytes=4,
    step_bytes=32,
    step_bytes_16bit=16,
    dispatches=0.5,
    like_parameter=1,
)
"""SGD with momentum, without weight decay: stepped in place."""
DECAYED_SGD = replace(SGD, source="torch/optim/sgd.py: no momentum", temporaries=Temporaries.ALL_AT_ONCE)
"""SGD without momentum; foreach, torch's default on CUDA."""


def _of_torchao(bits: int, block: int, table: int, formula: str) -> OptimizerMemory:
    width = bits // 4  # each state is read and written
    return OptimizerMemory(
        formula=f"{formula}; 2 b P for tensors below 4096 elements, and for those that blocks don't divide",
        source="torchao/optim/adam.py, _new_buffer. ASSUMPTION: its compiled step keeps no temporaries",
        least_bytes=bits // 4,
        step_bytes=12 + 2 * width,
        step_bytes_16bit=6 + 2 * width,
        dispatches=4,
        like_parameter=2,
        blocks=Blocks(bits=bits, num_elements=block, own_table_bytes=table, divides=True),
    )


TORCHAO_8BIT = _of_torchao(8, 256, 256 * 4, "2 P + 8 P / 256 + 2 KiB a parameter")
TORCHAO_4BIT = _of_torchao(4, 128, 16 * 4, "P + 8 P / 128 + 128 B a parameter")
TORCHAO_FP8 = _of_torchao(8, 256, 0, "2 P + 8 P / 256")
CPU_OFFLOAD = replace(
    FUSED_ADAMW,
    formula="0; 2 b P for tensors below 4096 elements",
    source="torchao/optim/cpu_offload.py: a copy, a gradient and the states of larger ones are on the host",
    least_bytes=0,
    offloads_from=4096,
)
