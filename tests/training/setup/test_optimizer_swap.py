"""The plan's optimizer on the script's parameter groups: same dicts, same schedulers, the promised states."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from accelerators import hooked, settings, wrap_all
from grouped_optimizers import VOCABULARY, WIDTH, groups, model
from refusals import refusal
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, SequentialLR

from zerofit.core.strategy import OptimizerName, ZeroStage
from zerofit.training.changes import Changes
from zerofit.training.setup import optimizer_swap

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")

WEIGHT = VOCABULARY * WIDTH
"""Elements of each matrix below; 8-bit states need 4096 at least (bitsandbytes, min_8bit_size)."""
FP32 = 4


def step(net: torch.nn.Module, optimizer: Any) -> None:
    tokens = torch.arange(VOCABULARY).reshape(8, -1)
    torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()


def state_bytes(optimizer: Any, parameter: torch.Tensor) -> int:
    tensors = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.numel() > 1)


@pytest.mark.parametrize("name", OptimizerName)
def test_groups_and_schedulers_are_the_scripts(name: OptimizerName) -> None:
    net = model()
    old = torch.optim.AdamW(groups(net), lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    scheduler = LambdaLR(old, lambda number: 1 / (1 + number))
    held = list(old.param_groups)
    new = optimizer_swap.swap(old, name, modules=net.modules())
    assert all(ours is theirs for ours, theirs in zip(new.param_groups, held, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of a scheduler whose optimizer does not step
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        step(net, new)
        scheduler.step()
    assert scheduler.optimizer is new
    assert [group["lr"] for group in new.param_groups] == [0.005, 0.01]
    assert [group["weight_decay"] for group in new.param_groups] == [0.1, 0.0]
    assert new.param_groups[0]["name"] == "the script's own"
    assert (new.param_groups[0].get("betas") == (0.8, 0.9)) is ("adamw" in name)
    assert "lion" not in name or new.param_groups[0]["betas"] == (0.9, 0.99)
    assert "amsgrad" in new.param_groups[0] or name is not OptimizerName.ADAMW


def test_an_adafactor_takes_the_scripts_rate_and_none_of_its_own() -> None:
    net = model()
    new = optimizer_swap.swap(torch.optim.AdamW(groups(net), lr=0.01), OptimizerName.ADAFACTOR)
    assert type(new).__name__ == "Adafactor"
    assert [(group["scale_parameter"], group["relative_step"]) for group in new.param_groups] == [
        (False, False),
        (False, False),
    ]
    assert [group["lr"] for group in new.param_groups] == [0.01, 0.02]


EIGHT_BIT = WEIGHT + FP32 * WEIGHT // 256 + FP32 * 256
"""A byte for each element, a scale for each 256 of them, and a table of 256 values."""


@pytest.mark.parametrize(
    ("name", "matrix", "embedding"),
    [
        (OptimizerName.ADAMW, 2 * FP32 * WEIGHT, 2 * FP32 * WEIGHT),
        (OptimizerName.PAGED_ADAMW, 2 * FP32 * WEIGHT, 2 * FP32 * WEIGHT),
        (OptimizerName.ADAMW_8BIT, 2 * EIGHT_BIT, 2 * FP32 * WEIGHT),
        (OptimizerName.PAGED_ADAMW_8BIT, 2 * EIGHT_BIT, 2 * FP32 * WEIGHT),
        (OptimizerName.LION, FP32 * WEIGHT, FP32 * WEIGHT),
        (OptimizerName.LION_8BIT, EIGHT_BIT, FP32 * WEIGHT),
        (OptimizerName.PAGED_LION_8BIT, EIGHT_BIT, FP32 * WEIGHT),
        (OptimizerName.ADAFACTOR, FP32 * (VOCABULARY + WIDTH), FP32 * (VOCABULARY + WIDTH)),
        (OptimizerName.SGD, 0, 0),
    ],
)
def test_the_states_are_what_was_promised_and_load_again(
    name: OptimizerName, matrix: int, embedding: int
) -> None:
    def begin() -> tuple[Any, Any]:
        net: Any = model()
        old = torch.optim.AdamW(net.parameters(), lr=0.01)
        return net, optimizer_swap.swap(old, name, modules=list(net.modules()))

    net, new = begin()
    for _ in range(3):
        step(net, new)
    assert state_bytes(new, net[1].weight) == matrix
    assert state_bytes(new, net[0].weight) == embedding
    assert getattr(new, "is_paged", False) is ("paged" in name)
    weights, states = copy.deepcopy((net.state_dict(), new.state_dict()))
    step(net, new)
    resumed, other = begin()
    resumed.load_state_dict(weights)
    other.load_state_dict(states)
    step(resumed, other)
    for ours, theirs in zip(resumed.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_of_every_optimizer_the_states_are_known() -> None:
    mark = test_the_states_are_what_was_promised_and_load_again.pytestmark[0]
    assert {name for name, *_ in mark.args[1]} == set(OptimizerName)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        lambda net: torch.optim.Adagrad(net.parameters(), lr=0.1),
        lambda net: torch.optim.Adafactor(net.parameters(), lr=0.1),
        lambda net: torch.optim.RMSprop(net.parameters(), lr=0.1, alpha=0.9),
    ],
)
@pytest.mark.parametrize("name", OptimizerName)
def test_what_means_nothing_to_the_new_one_is_dropped(make: Any, name: OptimizerName) -> None:
    net = model()
    new = optimizer_swap.swap(make(net), name, modules=net.modules())
    step(net, new)
    assert not {"alpha", "d", "lr_decay", "initial_accumulator_value"} & new.param_groups[0].keys() or (
        "adamw" in name  # that of bitsandbytes has an alpha of its own
    )
    assert new.param_groups[0]["lr"] == 0.1
    if name is OptimizerName.SGD and "momentum" in (own := make(net)).param_groups[0]:
        assert new.param_groups[0]["momentum"] == own.param_groups[0]["momentum"]


@pytest.mark.parametrize("kind", ["chained", "sequential"])
def test_schedulers_made_of_others_are_led_too(kind: str) -> None:
    net = model()
    old = torch.optim.AdamW(net.parameters(), lr=0.01)
    parts = [LambdaLR(old, lambda number: 1.0), LambdaLR(old, lambda number: 0.5)]
    whole = ChainedScheduler(parts) if kind == "chained" else SequentialLR(old, parts, milestones=[1])
    new = optimizer_swap.swap(old, OptimizerName.ADAFACTOR)
    assert {id(part.optimizer) for part in (*whole._schedulers,)} == {id(new)}


@pytest.mark.parametrize("at_once", [True, False])
def test_prepare_swaps_and_the_prepared_scheduler_follows(at_once: bool) -> None:
    accelerator_class, changes = hooked(optimizer=OptimizerName.ADAFACTOR)
    accelerator = accelerator_class()
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = LambdaLR(optimizer, lambda number: 1 / (1 + number))
    if at_once:
        net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    else:
        net = accelerator.prepare_model(net)
        optimizer = accelerator.prepare_optimizer(optimizer)
        scheduler = accelerator.prepare_scheduler(scheduler)
    step(net, optimizer)
    scheduler.step()
    assert type(optimizer.optimizer).__name__ == "Adafactor"
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 0.005
    assert changes.lines == ("the optimizer is transformers's Adafactor; the script says torch's AdamW",)


@pytest.mark.parametrize("by_script", [True, False])
@pytest.mark.parametrize("own", [torch.optim.AdamW, torch.optim.SGD])
def test_sgd_steps_one_by_one_trainers_too(own: Any, by_script: bool) -> None:
    accelerator_class, _ = hooked(optimizer=OptimizerName.SGD)
    accelerator = accelerator_class()
    accelerator._zerofit_by_script = by_script
    optimizer = accelerator.prepare(own(model().parameters(), lr=0.01, weight_decay=0.1))
    is_sgd = type(optimizer.optimizer) is torch.optim.SGD
    assert is_sgd is (by_script or own is torch.optim.SGD)
    assert [group["foreach"] for group in optimizer.param_groups] == [False if is_sgd else None]


def test_fused_adamw_stays_fused_after_loading_what_was_not() -> None:
    accelerator_class, _ = hooked(optimizer=OptimizerName.ADAMW)
    own, net = model(), model()
    saved = torch.optim.AdamW(own.parameters(), lr=0.01)
    step(own, saved)
    optimizer = accelerator_class().prepare(torch.optim.AdamW(net.parameters(), lr=0.01, fused=True))
    optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
    assert [group["fused"] for group in optimizer.param_groups] == [True]
    net.load_state_dict(own.state_dict())
    for one, its in ((own, saved), (net, optimizer)):
        step(one, its)
    for parameter, expected in zip(net.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize("at_once", [True, False])
def test_of_several_optimizers_none_is_swapped(at_once: bool) -> None:
    accelerator_class, changes = hooked(optimizer=OptimizerName.SGD)
    accelerator = accelerator_class()
    nets = model(), model()
    own = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]
    if at_once:
        prepared = accelerator.prepare(*own)
    else:
        prepared = [accelerator.prepare(net, optimizer)[1] for net, optimizer in zip(nets, own, strict=True)]
    assert [wrapper.optimizer for wrapper in prepared] == own
    assert changes.lines == (
        "the script's optimizers stay; sgd does not take their place: the script has several, and each would "
        "need its own",
    )


def test_an_optimizer_with_states_stays() -> None:
    accelerator_class, changes = hooked(optimizer=OptimizerName.SGD)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    step(net, optimizer)
    assert accelerator_class().prepare(optimizer).optimizer is optimizer
    assert changes.lines[0].endswith("it has made steps already")


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (
            lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=False),
            (
                "the optimizer is torch's AdamW; the script says torch's SGD; momentum=0.9 of the script's "
                "has no place in it",
                "the learning rate of 0.1 is the script's, for SGD; at the same rate AdamW takes steps of "
                "another size, and may need another",
            ),
        ),
        (
            lambda net: torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.8, 0.9)),
            ("the optimizer is torch's AdamW; the script says torch's Adam",),
        ),
        (lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, amsgrad=True), ()),
    ],
)
def test_what_is_dropped_is_named_and_what_is_alike_stays(make: Any, lines: tuple[str, ...]) -> None:
    accelerator_class, changes = hooked(optimizer=OptimizerName.ADAMW)
    own = make(model())
    prepared = accelerator_class().prepare(own)
    assert (prepared.optimizer is own) is (not lines)
    assert changes.lines == lines


@pytest.mark.parametrize(
    ("own", "name", "stays"),
    [
        ("AdamW8bit", OptimizerName.ADAMW_8BIT, True),
        ("PagedAdamW8bit", OptimizerName.ADAMW_8BIT, True),
        ("AdamW8bit", OptimizerName.PAGED_ADAMW_8BIT, False),
        ("AdamW", OptimizerName.ADAMW_8BIT, False),
        ("PagedAdamW32bit", OptimizerName.PAGED_ADAMW, True),
        ("PagedLion", OptimizerName.LION, True),
        ("Lion8bit", OptimizerName.LION, False),
        ("AdamW8bit", OptimizerName.LION_8BIT, False),
    ],
)
def test_bitsandbytes_own_stays_where_it_is_as_small(own: str, name: OptimizerName, stays: bool) -> None:
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, own)(model().parameters())
    assert (optimizer_swap.swap(optimizer, name) is optimizer) is stays


@pytest.mark.parametrize(
    ("own", "name", "betas"),
    [
        ("AdamW", OptimizerName.LION_8BIT, (0.9, 0.99)),
        ("Lion", OptimizerName.LION_8BIT, (0.7, 0.8)),
        ("Lion", OptimizerName.ADAMW_8BIT, (0.9, 0.999)),
        ("AdamW", OptimizerName.PAGED_ADAMW, (0.7, 0.8)),
    ],
)
def test_lions_betas_are_no_adamws(own: str, name: OptimizerName, betas: tuple[float, float]) -> None:
    import bitsandbytes

    optimizer = getattr(bitsandbytes.optim, own)(model().parameters(), betas=(0.7, 0.8))
    assert optimizer_swap.swap(optimizer, name).param_groups[0]["betas"] == betas


def test_lion_keeps_the_learning_rate_and_says_so() -> None:
    accelerator_class, changes = hooked(optimizer=OptimizerName.LION)
    own = torch.optim.AdamW(model().parameters(), lr=0.002, betas=(0.8, 0.999))
    LambdaLR(own, lambda number: 0.0)  # a warm-up begins at nothing
    prepared = accelerator_class().prepare(own)
    assert prepared.param_groups[0]["initial_lr"] == 0.002
    assert changes.lines == (
        "the optimizer is bitsandbytes's Lion; the script says torch's AdamW; betas=(0.8, 0.999) of the "
        "script's has no place in it",
        "Lion trains at the script's learning rate of 0.002; it steps by signs, and its authors take 3 to 10 "
        "times less than with AdamW, with as many times the weight decay "
        "(https://arxiv.org/abs/2302.06675, section 5)",
    )


def test_embeddings_keep_whole_states_though_the_optimizer_comes_alone() -> None:
    accelerator_class, _ = hooked(optimizer=OptimizerName.LION_8BIT)
    net = model()
    optimizer = accelerator_class().prepare(torch.optim.AdamW(net.parameters(), lr=0.01))
    step(net, optimizer)
    assert optimizer.state[net[0].weight]["state1"].dtype is torch.float32
    assert optimizer.state[net[1].weight]["state1"].dtype is torch.uint8


def test_an_optimizer_that_finds_its_own_rate_has_none_to_hand_on() -> None:
    from transformers.optimization import Adafactor

    own = Adafactor(model().parameters())
    assert refusal(optimizer_swap.swap, own, OptimizerName.ADAMW).rule == "optimizer-without-rate"
    assert optimizer_swap.swap(own, OptimizerName.ADAFACTOR) is own


@pytest.mark.parametrize("switch", ["amsgrad", "maximize"])
def test_another_mathematics_is_refused(switch: str) -> None:
    own = torch.optim.AdamW(model().parameters(), **{switch: True})
    refused = refusal(optimizer_swap.swap, own, OptimizerName.ADAFACTOR)
    assert refused.rule == "optimizer-switch-not-taken-over"
    assert f"AdamW({switch}=True)" in str(refused)


@pytest.mark.parametrize("name", [OptimizerName.SGD, OptimizerName.ADAMW_8BIT])
def test_hooks_around_the_scripts_steps_stay(name: OptimizerName) -> None:
    net = model()
    old = torch.optim.AdamW(groups(net), lr=0.01)
    calls: list[str] = []
    old.register_step_pre_hook(lambda *_: calls.append("before"))
    old.register_step_post_hook(lambda *_: calls.append("after"))
    step(net, optimizer_swap.swap(old, name, modules=net.modules()))
    assert calls == ["before", "after"]


@pytest.mark.parametrize(
    ("kind", "said"), [(torch.optim.Adagrad, "warning[zero-rebuilds-adagrad]"), (torch.optim.AdamW, "")]
)
def test_an_optimizer_that_zero_changes_is_warned_of_when_it_is_prepared(
    kind: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checks before the launch may not have found it in the source."""
    owner = type("Accelerator", (), {"prepare": lambda self, *objects: objects})
    wanted = settings(uses_deepspeed=True, zero_stage=ZeroStage.GRADIENTS)
    wrap_all(owner, optimizer_swap.check_wrappers(owner, wanted, Changes(announce=True)))
    optimizer = kind(model().parameters())
    assert owner().prepare(optimizer) == (optimizer,)
    assert capsys.readouterr().err.partition(":")[0] == said
