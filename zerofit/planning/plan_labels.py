"""Labels of plans: strategies, batches, sizes, times and rates as they are displayed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder
from zerofit.core.facts import parameters
from zerofit.core.freezing import FREEZES, is_word
from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.strategy import Buckets, Engine, OffloadDevice, Strategy
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from zerofit.core.estimates import Estimate, MemoryEstimate, PhaseMemory, StepTime
    from zerofit.core.facts import Machine, ModelFacts
    from zerofit.core.plan import Plan, Topology
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy


_LEAST_SHOWN = 2**27
"""Terms below an eighth of a GiB would be displayed as 0.0 or 0.1."""


def label(strategy: Strategy, topology: Topology, *, beside: Strategy | None = None) -> str:
    """Return a strategy in a few words: "ZeRO-2, checkpointing"; its precision only if `beside` differs."""
    if strategy.engine is Engine.NATIVE:
        schedule = "1F1B" if topology.pipeline_parallel_size > 1 else "DDP"
        schedule = "interleaved 1F1B" if topology.is_interleaved else schedule
        words = [schedule if topology.world_size > 1 else "one GPU"]
    elif strategy.engine is Engine.FSDP2:
        words = ["FSDP2" if strategy.reshard_after_forward else "FSDP2 without resharding"]
        words += [f"{topology.dp_replicate_size} copies"] if topology.dp_replicate_size > 1 else []
    else:
        words = [f"ZeRO-{strategy.zero_stage.value}"]
    words += [f"{short} {size}" for short, size in group_sizes(topology)]
    if topology.is_interleaved:
        words.append(f"{topology.pipeline_stages_per_rank} stages each")
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        words.append(f"optimizer on {strategy.optimizer_offload.value}")
    if strategy.param_offload is not OffloadDevice.NONE:
        words.append(f"weights on {strategy.param_offload.value}")
    if strategy.gradient_checkpointing:
        every = strategy.checkpoint_every
        place = " to the host" if strategy.activation_offload else ""
        words.append(f"checkpointing{'' if every == 1 else f' 1 block in {every}'}{place}")
    if strategy.optimizer is not None and strategy.optimizer_offload is OffloadDevice.NONE:
        words.append(REPLACEMENTS[strategy.optimizer].label)
    if strategy.lora is not None:
        words.append(f"LoRA {strategy.lora.rank}")
    if strategy.quantization is not None:
        stored = f" stored in {strategy.quant_storage}" if strategy.quant_storage is not None else ""
        words.append(f"{strategy.quantization} base{stored}")
    if strategy.freeze:
        words.append(frozen_words(strategy.freeze))
    if strategy.buckets != Buckets():
        words.append("small buckets")
    if strategy.attention is not None:
        words.append(f"{strategy.attention} attention")
    if strategy.liger:
        words.append("Liger")
    if strategy.compile:
        words.append("compiled")
    if beside is not None and strategy.precision not in (None, beside.precision):
        words.append(strategy.precision.value)
    return ", ".join(words)


def group_sizes(topology: Topology) -> tuple[tuple[str, int], ...]:
    """Return the size of each kind of group larger than 1, by its short name: ("sp", 8)."""
    sizes = (
        ("tp", topology.tensor_parallel_size),
        ("sp", topology.sequence_parallel_size),
        ("pp", topology.pipeline_parallel_size),
    )
    return tuple((short, size) for short, size in sizes if size > 1)


def strategy_words(plan: Plan) -> str:
    """Return a plan's strategy in a sentence: "ZeRO-2, checkpointing, micro-batches 4 x 2"."""
    return f"{label(plan.strategy, plan.topology)}, micro-batches {batch(plan.strategy)}"


def frozen_words(freeze: tuple[str, ...]) -> str:
    """Return what is frozen: "frozen embeddings", "frozen embeddings+6", "frozen weights" for patterns."""
    if freeze in FREEZES:
        return FREEZES[freeze]
    are_words = all(is_word(name) for name in freeze)
    return f"frozen {', '.join(freeze)}" if are_words else "frozen weights"


def kind_label(strategy: Strategy, topology: Topology) -> str:
    """Return where a strategy stores the model states: "ZeRO-3, optimizer on cpu"."""
    names = ("engine", "zero_stage", "optimizer_offload", "param_offload", "reshard_after_forward")
    return label(Strategy(**{name: getattr(strategy, name) for name in names}), topology)


def batch(strategy: Strategy) -> str:
    """Return micro-batch and accumulation: "4 x 2"."""
    return f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps}"


def gib(num_bytes: float) -> str:
    """Return a size as a number of GiB."""
    return f"{num_bytes / GIB:.1f}"


def model_words(model: ModelFacts) -> str:
    """Return a model's name, class and size: "llama-3-8b (LlamaForCausalLM, 8.03 B parameters)"."""
    kind, size = model.architecture or model.model_type, f"{parameters(model)} parameters"
    return f"{model.name} ({size if kind == model.name else f'{kind}, {size}'})"


def memory_label(estimate: MemoryEstimate) -> str:
    """Return a peak in GiB with its uncertainty: "62.1 ±5%"."""
    return f"{gib(estimate.peak_bytes)} ±{estimate.uncertainty:.0%}"


def range_label(estimate: MemoryEstimate) -> str:
    """Return both ends of a peak in GiB: "43.3 to 64.9"."""
    low, high = gib(estimate.lower_bytes), gib(estimate.upper_bytes)
    return low if low == high else f"{low} to {high}"


def terms_words(phase: PhaseMemory) -> str:
    """Return the large terms of a phase, the largest first: "weights 15.0, NCCL 0.7 GiB"."""
    sums: Counter[str] = Counter()
    for term in phase.terms:
        if term.holder is not Holder.MAPPED:
            sums[term.name] += term.num_bytes
    terms = sums.most_common()
    shown = [term for term in terms if term[1] >= _LEAST_SHOWN] or terms[:1]
    return f"{', '.join(f'{name} {gib(num_bytes)}' for name, num_bytes in shown)} GiB"


def gpus_words(machine: Machine) -> str:
    """Return the GPUs of one node: "8 x NVIDIA A100-SXM4-80GB"."""
    kinds = Counter(gpu.name for gpu in machine.gpus)
    return ", ".join(f"{count} x {name}" for name, count in kinds.items())


def fit_words(estimate: Estimate, problem: Problem) -> str:
    """Return "fits", or "fits closely" if the estimate's upper end exceeds GPU or host memory."""
    return "fits closely" if problem.is_close(estimate) else "fits"


def seconds(number: float) -> str:
    """Return a time: "0.41 ms", "380 ms", "3.24 s", "12.5 s"."""
    size = abs(number)
    if size < 1:
        return f"{number * 1000:.2g} ms" if size < 0.001 else f"{number * 1000:.0f} ms"
    return f"{number:.2f} s" if size < 10 else f"{number:.1f} s" if size < 100 else f"{number:.0f} s"


def step_time_label(step_time: StepTime | None) -> str:
    """Return a step's time with its uncertainty; "-" if unknown."""
    return "-" if step_time is None else f"{seconds(step_time.seconds)} ±{step_time.uncertainty:.0%}"


def rate(per_s: float | None) -> str:
    """Return a rate in three digits; "-" if unknown."""
    if not per_s:
        return "-"
    if per_s >= 1000:
        return f"{per_s / 1000:.3g}k" if per_s < 1e6 else f"{per_s / 1e6:.3g}M"
    return f"{per_s:.3g}"


def rate_name(estimate: Estimate, model: ModelFacts) -> str:
    """Return the unit of `throughput`."""
    if estimate.tokens_per_step:
        return "tokens/s"
    return "images/s" if "Image" in model.architecture else "samples/s"


def throughput(judged: EstimatedStrategy, topology: Topology) -> str:
    """Return the tokens or samples per second over all ranks; "-" if unknown."""
    estimate, strategy = judged.estimate, judged.strategy
    if estimate.tokens_per_step or estimate.step_time is None or strategy.micro_batch_size is None:
        return rate(estimate.tokens_per_s)
    samples = strategy.micro_batch_size * (strategy.gradient_accumulation_steps or 1)
    return rate(samples * topology.data_parallel_size / estimate.step_time.seconds)


def workload_words(problem: Problem) -> str:
    """Return what a step processes: "sequence 4096, global batch 64"."""
    workload, length = problem.workload, problem.workload.sequence_length
    words = [f"text of {length} tokens" if problem.model.hears else f"sequence {length}"] if length else []
    if workload.target_length:
        words.append(f"target {workload.target_length}")
    if workload.global_batch_size:
        words.append(f"global batch {workload.global_batch_size}")
    if workload.sequence_length:
        words.append("padded" if workload.is_padded else "no padding")
    return ", ".join(words)
