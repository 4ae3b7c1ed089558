"""AllocationLogs made by hand or at random, for tests: small models with layers, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from zerofit.core.allocation_log import AllocationLog, Event, Storages, TensorKind, TracedParameter

MAX_FIXED = 1 << 16
MAX_PER_SAMPLE = 3 << 20


@dataclass
class LogBuilder:
    """Grows a log event by event; ``build`` freezes it."""

    modules: list[str] = field(default_factory=lambda: [""])
    parameters: list[TracedParameter] = field(default_factory=list)
    storages: list[tuple[TensorKind, int, int, int]] = field(default_factory=list)
    events: list[tuple[Event, int]] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    buffer_bytes: tuple[int, ...] = ()

    def module(self, name: str) -> int:
        """Add a module and return its index."""
        self.modules.append(name)
        return len(self.modules) - 1

    def parameter(
        self, module: int, num_elements: int, *, bytes_per_element: int = 4, trains: bool = True
    ) -> int:
        """Add a parameter that the module holds and return its index."""
        name = f"{self.modules[module]}.weight{len(self.parameters)}".lstrip(".")
        self.parameters.append(
            TracedParameter(
                name=name,
                num_elements=num_elements,
                bytes_per_element=bytes_per_element,
                trains=trains,
                module=module,
            )
        )
        return len(self.parameters) - 1

    def note(self, event: Event, argument: int = 0) -> None:
        """Note an event that is no birth."""
        self.events.append((event, argument))

    def allocate(self, kind: TensorKind, module: int, *, fixed: int = 0, per_sample: int = 0) -> int:
        """Note a storage's birth and return its index."""
        self.storages.append((kind, fixed, per_sample, module))
        self.note(Event.ALLOCATE, len(self.storages) - 1)
        return len(self.storages) - 1

    def free(self, *storages: int) -> None:
        """Note the death of storages."""
        for storage in storages:
            self.note(Event.FREE, storage)

    def gradient(self, parameter: int) -> None:
        """Note the birth of a parameter's gradient, whole at once; nothing for a frozen one."""
        one = self.parameters[parameter]
        if not one.trains:
            return
        size = one.num_elements * one.bytes_per_element
        self.gradients[parameter] = self.allocate(TensorKind.GRADIENT, one.module, fixed=size)
        self.note(Event.GRADIENT_READY, parameter)

    def build(self) -> AllocationLog:
        """Return the log."""
        kinds, fixed, per_sample, modules = zip(*self.storages, strict=True) if self.storages else ((),) * 4
        numbers = range(len(self.parameters))
        held = tuple(
            tuple(number for number in numbers if self.parameters[number].module == module)
            for module in range(len(self.modules))
        )
        return AllocationLog(
            least_micro_batch_size=1,
            modules=tuple(self.modules),
            module_parameters=held,
            parameters=tuple(self.parameters),
            buffer_bytes=self.buffer_bytes,
            storages=Storages(
                kinds=kinds,
                fixed_bytes=fixed,
                bytes_per_sample=per_sample,
                modules=modules,
                operators=(0,) * len(self.storages),
            ),
            operators=("made",),
            codes=bytes(code for code, _ in self.events),
            arguments=tuple(argument for _, argument in self.events),
            gradient_storages=tuple(self.gradients.get(number, -1) for number in numbers),
            costs=(),
        )


@dataclass(frozen=True)
class LayerSizes:
    """What one layer of a made model is: a first half with its activations, and a second."""

    elements: tuple[int, int] = (1 << 16, 1 << 18)
    """Elements of the two halves' parameters."""
    trains: tuple[bool, bool] = (True, True)
    fixed: int = 0
    """Bytes of each activation that do not grow with the micro-batch."""
    per_sample: tuple[int, int] = (1 << 18, 1 << 20)
    """Bytes a sample of the two halves' activations."""
    workspace: int = 0
    """Bytes of scratch memory that each half takes and gives back."""


def layered_log(
    layers: tuple[LayerSizes, ...] = (LayerSizes(), LayerSizes()),
    *,
    checkpointing: bool = False,
    bytes_per_element: int = 4,
    output_per_sample: int = 1 << 16,
    input_per_sample: int = 1 << 12,
    buffer_bytes: tuple[int, ...] = (),
) -> AllocationLog:
    """Return the log of a stack of layers with an input, an output, and, if asked, checkpointed layers.

    Module 0 is the model; layer i is module 1 + 3 i, with its halves after it; each half holds one parameter.
    """
    made = LogBuilder(buffer_bytes=buffer_bytes)
    for index, sizes in enumerate(layers):
        made.module(f"layers.{index}")
        for half in range(2):
            module = made.module(f"layers.{index}.{('attention', 'mlp')[half]}")
            made.parameter(
                module, sizes.elements[half], bytes_per_element=bytes_per_element, trains=sizes.trains[half]
            )
    batch = made.allocate(TensorKind.INPUT, -1, per_sample=input_per_sample)
    made.note(Event.FORWARD_ENTER, 0)
    kept: list[list[int]] = []
    for index, sizes in enumerate(layers):
        acts = _forward(made, 1 + 3 * index, sizes, TensorKind.ACTIVATION)
        if checkpointing:
            made.free(acts[0])  # the second half's output is the next layer's input
            acts = acts[1:]
        kept.append(acts)
    output = made.allocate(TensorKind.OUTPUT, 0, per_sample=output_per_sample)
    made.note(Event.FORWARD_LEAVE, 0)
    made.note(Event.FORWARD_ENDS)
    made.note(Event.BACKWARD_ENTER, 0)
    incoming = made.allocate(TensorKind.ACTIVATION_GRADIENT, 0, per_sample=output_per_sample)
    for index in reversed(range(len(layers))):
        sizes, module = layers[index], 1 + 3 * index
        made.note(Event.BACKWARD_ENTER, module)
        if checkpointing:
            kept[index] += _forward(made, module, sizes, TensorKind.RECOMPUTED)
        for half in (1, 0):
            made.note(Event.BACKWARD_ENTER, module + 1 + half)
            outgoing = made.allocate(
                TensorKind.ACTIVATION_GRADIENT,
                module + 1 + half,
                fixed=sizes.fixed,
                per_sample=sizes.per_sample[half],
            )
            made.gradient(2 * index + half)
            made.free(kept[index].pop(), incoming)
            incoming = outgoing
            made.note(Event.BACKWARD_LEAVE, module + 1 + half)
        made.free(*kept[index])
        made.note(Event.BACKWARD_LEAVE, module)
    made.free(incoming)
    made.note(Event.BACKWARD_LEAVE, 0)
    made.free(output, batch)
    return made.build()


def _forward(made: LogBuilder, module: int, sizes: LayerSizes, kind: TensorKind) -> list[int]:
    """Note one layer's forward pass and return the storages of its two halves' activations."""
    made.note(Event.FORWARD_ENTER, module)
    acts = []
    for half in range(2):
        made.note(Event.FORWARD_ENTER, module + 1 + half)
        inner = module + 1 + half
        workspace = made.allocate(TensorKind.WORKSPACE, inner, fixed=sizes.workspace)
        acts.append(made.allocate(kind, inner, fixed=sizes.fixed, per_sample=sizes.per_sample[half]))
        made.free(workspace)
        made.note(Event.FORWARD_LEAVE, inner)
    made.note(Event.FORWARD_LEAVE, module)
    return acts


def layer_sizes() -> st.SearchStrategy[LayerSizes]:
    """Random layers; a frozen parameter now and then."""
    elements = st.integers(1, 1 << 20)
    per_sample = st.integers(0, MAX_PER_SAMPLE)
    return st.builds(
        LayerSizes,
        elements=st.tuples(elements, elements),
        trains=st.tuples(st.booleans(), st.just(True)),
        fixed=st.integers(0, MAX_FIXED),
        per_sample=st.tuples(per_sample, per_sample),
        workspace=st.sampled_from((0, 512, 1 << 20, 8_519_680)),
    )


@st.composite
def random_layers(draw: st.DrawFn, *, most: int = 4) -> tuple[LayerSizes, ...]:
    """Random stacks of layers, to be given to ``layered_log``."""
    return tuple(draw(st.lists(layer_sizes(), min_size=1, max_size=most)))


@st.composite
def random_logs(draw: st.DrawFn, *, most: int = 4) -> AllocationLog:
    """Random logs of up to ``most`` layers, with and without checkpointing, in fp32 or 16 bit."""
    return layered_log(
        draw(random_layers(most=most)),
        checkpointing=draw(st.booleans()),
        bytes_per_element=draw(st.sampled_from((2, 4))),
        output_per_sample=draw(st.integers(0, MAX_PER_SAMPLE)),
    )
