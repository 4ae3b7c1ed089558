"""trace_generation: what a batch of prompts allocates, from the model's forward passes with its own cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event, TensorKind, Trace
from zerofit.core.validation import check_at_least
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.meta_device import transformers_config
from zerofit.models.trace.cache import key_of, read_trace, write_trace
from zerofit.models.trace.entry import Tracing, on_fake_tensors
from zerofit.models.trace.run import recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from zerofit.core.allocation_log import AllocationLog, TraceRequest
    from zerofit.models.source import ModelSource
    from zerofit.models.trace.raw import RawLog, Skeleton
    from zerofit.models.trace.recorder import Recorder

_PASSES = ("prefill", "decode")
_CACHES = ("past_key_values", "cache_params")
"""Names of a model's cache among its inputs and outputs: of attention, and of state-space models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """The sizes of a model.generate() call, whatever its number of prompts."""

    prompt_length: int
    """Tokens of the longest prompt, to which the others are padded."""
    max_new_tokens: int
    num_beams: int = 1
    num_return_sequences: int = 1
    samples: bool = True
    """True if tokens are sampled, which sorts the logits."""

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prompt_length", "max_new_tokens", "num_beams", "num_return_sequences")

    @property
    def sequences_per_prompt(self) -> int:
        """Rows of the decoder's batch per prompt.

        Source: transformers 5.23, generation/utils.py, _expand_inputs_for_generation in generate().
        """
        return max(self.num_beams, self.num_return_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTrace:
    """The logs of a call, whose samples are prompts."""

    call: GenerateCall
    prefill: Trace
    """The pass over the prompts, which fills the cache."""
    decode: Trace
    """The pass that makes the last token: the cache is largest. It is there from the start."""


def trace_generation(
    source: ModelSource,
    call: GenerateCall,
    request: TraceRequest,
    *,
    cache_folder: Path | None,
    as_on_cuda: bool = True,
) -> GenerationTrace:
    """Return the allocations of a generate() call, as functions of the number of prompts.

    The model's own class runs forward without gradients on tensors with shapes but no values, and makes its
    own cache: grouped or latent heads, sliding windows and an encoder's keys need no formulas.

    Args:
        source: output of probe_model.
        request: format of the weights and the GPU; its lengths are not used.
        cache_folder: the folder of traces; None disables the cache.
        as_on_cuda: whether CUDA kernels replace the CPU's.

    Raises:
        UserError: the model can't run on such tensors.
    """
    words = (repr(call), f"as_on_cuda={as_on_cuda}")
    key = "" if cache_folder is None else key_of(source, request, *words)
    paths = [] if cache_folder is None else [cache_folder / f"{key}-{name}.trace" for name in _PASSES]
    known = [trace for path in paths if (trace := read_trace(path, request)) is not None]
    if len(known) == len(_PASSES):
        return GenerationTrace(call=call, prefill=known[0], decode=known[1])
    made = _trace_source(source, call, request, as_on_cuda=as_on_cuda)
    for path, trace in zip(paths, (made.prefill, made.decode), strict=False):
        write_trace(path, trace)
    return made


def _trace_source(
    source: ModelSource, call: GenerateCall, request: TraceRequest, *, as_on_cuda: bool
) -> GenerationTrace:
    import transformers

    config = transformers_config(source, trust_remote_code=source.trust_remote_code)
    auto_class: Any = getattr(transformers, source.task.auto_class)
    build = partial(auto_class.from_config, config, trust_remote_code=source.trust_remote_code)
    return trace_call(build, call, request, name=source.facts.name, as_on_cuda=as_on_cuda)


def trace_call(
    build: Callable[..., Any],
    call: GenerateCall,
    request: TraceRequest,
    *,
    name: str,
    as_on_cuda: bool = True,
    all_layers: bool = False,
) -> GenerationTrace:
    """Return the allocations of a generate() call of a model that `build` makes in a dtype.

    Args:
        name: of the model, for messages.
        all_layers: whether every layer must run, without replication.
    """
    from transformers.initialization import no_init_weights

    with on_fake_tensors(name, request):
        with no_init_weights():
            model = build(dtype=torch_dtype(request.weights))
        model.tie_weights()  # not handled by no_init_weights
        model.eval().requires_grad_(False)

        def traced(tokens: int, num_steps: int) -> Trace:
            def run(skeleton: Skeleton, prompts: int) -> RawLog[int]:
                with recording(model, skeleton, request, as_on_cuda=as_on_cuda) as recorder:
                    _run_passes(model, prompts, tokens, num_steps, call, recorder)
                return recorder.log

            return Tracing(model, request, run, lambda _: None).trace(all_layers=all_layers)

        first = 1 if model.config.is_encoder_decoder else call.prompt_length
        prefill = traced(first, 0)
        if call.max_new_tokens == 1:
            return GenerationTrace(call=call, prefill=prefill, decode=prefill)
        num_steps = min(_NUM_STEPS, call.max_new_tokens - 1)
        decode = traced(first + call.max_new_tokens - 1 - num_steps, num_steps)
    last = replace(decode, logs=tuple(_last_pass(log) for log in decode.logs))
    return GenerationTrace(call=call, prefill=prefill, decode=last)


_NUM_STEPS = 2
"""Steps of one token each at the end of a completion: a sliding window's layer keeps the whole prompt until
the first, as a view, so that only later ones show what it needs (transformers 5.23, cache_utils.py,
DynamicSlidingWindowLayer.update)."""


def _run_passes(
    model: Any, prompts: int, tokens: int, num_steps: int, call: GenerateCall, recorder: Recorder
) -> None:
    """Run a pass over the first tokens of each sequence, and one for each of some further tokens."""
    import torch

    with torch.no_grad():
        inputs, cache = _inputs(model, prompts, tokens, call, recorder), dict[str, Any]()
        recorder.phase = TensorKind.ACTIVATION
        for step in range(num_steps + 1):
            if step:
                inputs = _next_inputs(inputs, tokens + step, has_cache=bool(cache))
            outputs = model(**inputs, **cache, **_last_logits(model), use_cache=True)
            cache = _cache_of(outputs)
            # generate() holds the scores through the next pass.
            scores = _choose_tokens(outputs, cache, call, recorder)
            for tensor in _tensors_of(list(cache.values()), set()):
                recorder.retag(tensor, TensorKind.CACHE)
            del outputs
            recorder.log.note(Event.FORWARD_ENDS, 0)
        recorder.close()
        del scores


def _inputs(model: Any, prompts: int, tokens: int, call: GenerateCall, recorder: Recorder) -> dict[str, Any]:
    """Return the inputs of the first pass; an encoder has run for them, once per prompt."""
    import torch

    each = call.sequences_per_prompt
    is_pair = model.config.is_encoder_decoder
    rows, length = (prompts, call.prompt_length) if is_pair else (prompts * each, tokens)
    ids = torch.zeros((rows, length), dtype=torch.int64)
    mask = torch.ones_like(ids)
    mask[..., 0] = 0  # decoders are padded on the left
    recorder.know_inputs({"attention_mask": mask})
    if not is_pair:
        # As in generate(), each row has positions of its own.
        found = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.zeros_like(ids)}
        return {name: value for name, value in found.items() if name in _arguments(model)}
    recorder.phase = TensorKind.ACTIVATION
    encoded = model.get_encoder()(input_ids=ids, attention_mask=mask, return_dict=True)
    if each > 1:
        encoded.last_hidden_state = encoded.last_hidden_state.repeat_interleave(each, dim=0)
        mask = mask.repeat_interleave(each, dim=0)
    decoder_ids = torch.zeros((prompts * each, tokens), dtype=torch.int64)
    return {"encoder_outputs": encoded, "attention_mask": mask, "decoder_input_ids": decoder_ids}


def _next_inputs(inputs: dict[str, Any], tokens: int, *, has_cache: bool) -> dict[str, Any]:
    """Return the inputs of a pass over one further token; without a cache, over all tokens again."""
    import torch

    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    rows = inputs[name].shape[0]
    found = {**inputs, name: torch.zeros((rows, 1 if has_cache else tokens), dtype=torch.int64)}
    if "position_ids" in inputs:
        found["position_ids"] = torch.zeros_like(found[name])
    if name == "input_ids" and "attention_mask" in inputs:
        mask = inputs["attention_mask"]
        found["attention_mask"] = torch.cat([mask, mask.new_ones((rows, 1))], dim=-1)
    return found


def _last_logits(model: Any) -> dict[str, int]:
    """Return the argument that limits logits to the last token, where a model takes it, as in generate()."""
    return {"logits_to_keep": 1} if "logits_to_keep" in _arguments(model) else {}


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _choose_tokens(outputs: Any, cache: dict[str, Any], call: GenerateCall, recorder: Recorder) -> Any:
    """Do what generate() does with the last logits: copy them in fp32, sort them, reorder the beams' cache.

    ASSUMPTION: sampling has a temperature, top-k and top-p. Source: transformers 5.23, generation/utils.py,
    _sample and _beam_search.
    """
    import torch
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = outputs.logits[:, -1].to(torch.float32, copy=True)
    if call.num_beams > 1:
        scores = scores.log_softmax(dim=-1)
        scores = scores + torch.zeros_like(scores[:, :1])
        scores.view(-1, call.num_beams * scores.shape[-1]).topk(2 * call.num_beams)
        for each in cache.values():
            _reorder(each, torch.zeros(len(scores), dtype=torch.int64), recorder)
    elif call.samples:
        warpers = [TemperatureLogitsWarper(0.5), TopKLogitsWarper(2), TopPLogitsWarper(0.5)]
        scores = LogitsProcessorList(warpers)(None, scores)
        torch.multinomial(scores.softmax(dim=-1), num_samples=1)
    return scores


def _reorder(cache: Any, beams: Any, recorder: Recorder) -> None:
    """Do what cache.reorder_cache() does, with what it allocates assigned to the modules of the layers."""
    names = ("self_attention_cache", "cross_attention_cache")
    for part in [getattr(cache, name) for name in names if hasattr(cache, name)] or [cache]:
        for layer in getattr(part, "layers", None) or [part]:
            held = [recorder.index_of(tensor) for tensor in _tensors_of(layer, set())]
            made_in = [recorder.log.modules[index] for index in held if index is not None]
            with recorder.inside(made_in[0] if made_in else -1):
                layer.reorder_cache(beams)


def _cache_of(outputs: Any) -> dict[str, Any]:
    """Return a model's cache by the name of its input; empty if it has none."""
    return {name: value for name in _CACHES if (value := getattr(outputs, name, None)) is not None}


def _tensors_of(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the tensors in a cache: objects, lists and mappings of tensors."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif id(value) not in seen and not isinstance(value, (str, type)):
        seen.add(id(value))
        inner = value.values() if isinstance(value, dict) else value
        if not isinstance(value, (dict, list, tuple)):
            inner = vars(value).values() if hasattr(value, "__dict__") else ()
        for each in inner:
            yield from _tensors_of(each, seen)


def _last_pass(log: AllocationLog) -> AllocationLog:
    """Return the log of the last pass alone; what is left of the others is there from the start."""
    *_, ends, _ = (place for place, code in enumerate(log.codes) if code == Event.FORWARD_ENDS)
    alive: dict[int, None] = {}
    for code, storage in zip(log.codes[:ends], log.arguments[:ends], strict=True):
        if code == Event.ALLOCATE:
            alive[storage] = None
        elif code == Event.FREE:
            del alive[storage]
    return replace(
        log,
        codes=bytes([Event.ALLOCATE] * len(alive)) + log.codes[ends + 1 :],
        arguments=(*alive, *log.arguments[ends + 1 :]),
    )
