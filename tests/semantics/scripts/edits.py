"""One training loop that edits weights, gradients, parameters or its optimizer by hand, as its --edit says.

Each edit is of a kind that public scripts have, and that ZeRO, which steps a sharded copy of the weights,
would lose without a word.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from own_optimizers import ByOwnNorm, OwnAdam, Sharpness
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_SAMPLES, WIDTH, NUM_STEPS = 96, 16, 8
NARROW, WIDE = 32, 400
"""Sizes of hidden states. 400 x 400 is above DeepSpeed's stage3_param_persistence_threshold, 100,000."""


class Samples(Dataset):
    """Vectors, and a target of which one part depends on them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
        self.targets = torch.randn(NUM_SAMPLES, 1, generator=generator) + self.inputs[:, :1]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    """A body and three heads, of which a pass uses one; those with extra_every also the second."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU())
        self.heads = nn.ModuleList([nn.Linear(hidden, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int = 0, *, both: bool = False) -> torch.Tensor:
        hidden = self.body(x)
        out = self.heads[head](hidden)
        return out + 0.1 * self.heads[1](hidden) if both else out


@dataclass
class Loop:
    """What an edit may reach."""

    accelerator: Accelerator
    model: Any
    """As prepared."""
    optimizer: Any
    """As prepared."""
    own_optimizer: Any
    step: int = 0
    kept: dict[str, Any] = field(default_factory=dict)
    """What the edit keeps between steps."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    @property
    def net(self) -> Any:
        return self.accelerator.unwrap_model(self.model)


Act = Callable[[Loop], Any]


def nothing(_: Loop) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What a script does besides training."""

    optimizer: Callable[[Any], Any] = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
    before_prepare: Callable[[Any, Any], None] = lambda model, optimizer: None
    """Called with the model and the optimizer."""
    prepared: Act = nothing
    before_pass: Act = nothing
    after_backward: Act = nothing
    """Returns True to skip the step."""
    after_step: Act = nothing
    at_end: Act = nothing
    arguments: Callable[[int], dict[str, Any]] = lambda step: {}
    """Of a forward pass, by its step."""
    loss: Callable[[Loop, torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    zero_grad: dict[str, Any] = field(default_factory=dict)
    adapts: bool = False
    """Whether the model gets LoRA adapters."""


def sgd(model: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, **settings})


def decaying(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


# --- weights written after a step


@torch.no_grad()
def clamp(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.clamp_(-0.05, 0.05)


def clamp_data(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.data.clamp_(-0.05, 0.05)


def replace_data(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.data = parameter.data * 0.9


def write_by_numpy(loop: Loop) -> None:
    """Through shared memory, which torch does not see."""
    for parameter in loop.parameters:
        bits = torch.int32 if parameter.dtype == torch.float32 else torch.int16  # NumPy has no bf16
        memory = parameter.detach().view(bits).numpy()
        memory[...] = (parameter.detach() * 0.95).view(bits).numpy()


def normalize_in_a_hook(model: Any, optimizer: Any) -> None:
    @torch.no_grad()
    def normalize(*_: Any) -> None:
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(nn.functional.normalize(parameter, dim=1))

    optimizer.register_step_post_hook(normalize)


@torch.no_grad()
def lookahead(loop: Loop) -> None:
    slow = loop.kept.setdefault("slow", [one.detach().clone() for one in loop.parameters])
    if loop.step % 3 == 2:
        for behind, parameter in zip(slow, loop.parameters, strict=True):
            behind.add_(parameter - behind, alpha=0.5)
            parameter.copy_(behind)


def average_for_evaluation(loop: Loop) -> None:
    average = loop.kept.setdefault("average", [one.detach().clone() for one in loop.parameters])
    for mean, parameter in zip(average, loop.parameters, strict=True):
        mean.lerp_(parameter.detach(), 0.1)
    if loop.step % 3 == 2:
        kept = [one.detach().clone() for one in loop.parameters]
        for mean, parameter in zip(average, loop.parameters, strict=True):
            parameter.data.copy_(mean)
        with torch.no_grad():
            loop.model(torch.ones(2, WIDTH, device=loop.accelerator.device, dtype=loop.parameters[0].dtype))
        for before, parameter in zip(kept, loop.parameters, strict=True):
            parameter.data.copy_(before)


def average_of_main_process(loop: Loop) -> None:
    """Kept by the main process only, and put into the model there: the other ranks keep their weights."""
    if not loop.accelerator.is_main_process:
        return
    average = loop.kept.setdefault("average", [one.detach().clone() for one in loop.parameters])
    for mean, parameter in zip(average, loop.parameters, strict=True):
        mean.lerp_(parameter.detach(), 0.1)
        if loop.step % 4 == 3:
            parameter.data.copy_(mean)


def main_process_evaluates(loop: Loop) -> None:
    """Swaps an average in and back on the main process only."""
    if loop.accelerator.is_main_process:
        kept = [one.detach().clone() for one in loop.parameters]
        for parameter in loop.parameters:
            parameter.data.mul_(0.5)
        for before, parameter in zip(kept, loop.parameters, strict=True):
            parameter.data.copy_(before)


def narrow_parameters(model: Any, optimizer: Any) -> None:
    """As a DPO model that trains its policy only; without the argument that torch's has."""

    class Narrow(Net):
        def parameters(self) -> Any:  # type: ignore[override]
            return (one for _, one in self.named_parameters())

    model.__class__ = Narrow


def stochastic_average(loop: Loop) -> None:
    """SWA: the mean of the last weights is what the script ends with."""
    if loop.step < 4:
        return
    total = loop.kept.setdefault("sum", [torch.zeros_like(one) for one in loop.parameters])
    for mean, parameter in zip(total, loop.parameters, strict=True):
        mean.add_(parameter.detach(), alpha=1 / (NUM_STEPS - 4))


@torch.no_grad()
def end_with_average(loop: Loop) -> None:
    for mean, parameter in zip(loop.kept["sum"], loop.parameters, strict=True):
        parameter.copy_(mean)


@torch.no_grad()
def spectral_norm(loop: Loop) -> None:
    """Before each pass, by hand: the largest singular value becomes 1."""
    weight = loop.net.body[2].weight
    weight.div_(torch.linalg.matrix_norm(weight.float(), 2).to(weight.dtype))


@torch.no_grad()
def prune(loop: Loop) -> None:
    weight = loop.net.body[0].weight
    mask = loop.kept.setdefault("mask", (weight.abs() > weight.abs().median()).to(weight.dtype))
    weight.mul_(mask)


@torch.no_grad()
def noise_on_weights(loop: Loop) -> None:
    generator = torch.Generator().manual_seed(loop.step)
    for parameter in loop.parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(noise.to(parameter), alpha=1e-3)


@torch.no_grad()
def decay_by_hand(loop: Loop) -> None:
    for parameter in loop.parameters:
        if parameter.ndim == 2:
            parameter.mul_(0.99)


def reset_a_layer(loop: Loop) -> None:
    if loop.step == 3:
        with torch.random.fork_rng():
            torch.manual_seed(5)
            loop.net.body[2].reset_parameters()


def load_by_hand(loop: Loop) -> None:
    """The best weights so far come back."""
    if loop.step == 2:
        loop.kept["best"] = {name: one.detach().clone() for name, one in loop.net.state_dict().items()}
    if loop.step == 5:
        loop.net.load_state_dict(loop.kept["best"])


def write_by_vector(loop: Loop) -> None:
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(loop.parameters)
        nn.utils.vector_to_parameters(vector * 0.95, loop.parameters)


# --- gradients read or written between backward and step


def zero_biases(loop: Loop) -> None:
    for name, parameter in loop.model.named_parameters():
        if parameter.grad is not None and name.endswith("bias"):
            parameter.grad.zero_()


def clip_adaptively(loop: Loop) -> None:
    for parameter in loop.parameters:
        if parameter.grad is not None:
            most = 1e-2 * parameter.detach().norm().clamp_min(1e-3)
            parameter.grad.mul_((most / parameter.grad.norm().clamp_min(1e-6)).clamp_max(1))


def skip_large_norms(loop: Loop) -> bool:
    total = sum(float(one.grad.norm()) ** 2 for one in loop.parameters if one.grad is not None) ** 0.5
    return total > 1.2


def noise_on_gradients(loop: Loop) -> None:
    generator = torch.Generator().manual_seed(loop.step)
    for parameter in loop.parameters:
        if parameter.grad is not None:
            parameter.grad.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=0.01)


def centralize(loop: Loop) -> None:
    for parameter in loop.parameters:
        if parameter.grad is not None and parameter.ndim > 1:
            parameter.grad.sub_(parameter.grad.mean(1, keepdim=True))


def rates_by_norm(loop: Loop) -> None:
    """After the step, for the next one."""
    norms = [float(one.grad.norm()) for one in loop.parameters if one.grad is not None]
    for group in loop.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + sum(norms))


def replace_gradients(loop: Loop) -> None:
    for parameter in loop.parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad.sign()


def sharpness(loop: Loop) -> None:
    loop.own_optimizer.perturb()
    loop.accelerator.backward(loop.kept["loss"]())


def clamp_in_tensor_hooks(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def penalize_gradients(loop: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    out = loop.model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return ((out - y) ** 2).mean() + 0.1 * ((gradient.norm(dim=1) - 1) ** 2).mean()


def penalize_weights(loop: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Weight decay in the loss, of what the pass uses: DDP takes the others for unused."""
    norms = [parameter.float().square().sum() for parameter in loop.net.body.parameters()]
    return ((loop.model(x).float() - y) ** 2).mean() + 1e-2 * sum(norms)


# --- which parameters train


def freeze_late(loop: Loop) -> None:
    if loop.step == 2:
        loop.net.body[0].requires_grad_(False)


def frozen_body(model: Any, optimizer: Any) -> None:
    model.body[0].requires_grad_(False)


def unfreeze_late(loop: Loop) -> None:
    if loop.step == 2:
        loop.net.body[0].requires_grad_()


def unfreeze_gradually(loop: Loop) -> None:
    if loop.step == 2:
        loop.net.body[2].requires_grad_()
    if loop.step == 4:
        loop.net.body[0].requires_grad_()


def all_frozen_but_head(model: Any, optimizer: Any) -> None:
    model.body.requires_grad_(False)


def tie_late(loop: Loop) -> None:
    if loop.step == 2:
        loop.net.heads[0].weight = loop.net.heads[2].weight


def add_late(loop: Loop) -> None:
    if loop.step == 2:
        new = nn.Linear(loop.net.body[2].out_features, 1)
        with torch.no_grad():
            new.weight.fill_(0.01)
            new.bias.zero_()
        loop.net.heads[0] = new.to(loop.accelerator.device)
        loop.optimizer.add_param_group({"params": list(new.parameters())})


# --- optimizers that look at tensors


def of_package(package: str, name: str, **settings: Any) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        module = __import__(package, fromlist=[name])
        return getattr(module, name)(model.parameters(), **settings)

    return make


def lora_fa(model: Any) -> Any:
    from peft.optimizers import create_lorafa_optimizer

    return create_lorafa_optimizer(model, r=4, lora_alpha=8, lr=1e-2)


def lora_plus(model: Any) -> Any:
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=4)


def by_groups(act: Callable[[nn.Parameter], Any]) -> Act:
    """Return an edit that goes through the optimizer's groups, as many scripts do."""

    def edit(loop: Loop) -> None:
        with torch.no_grad():
            for group in loop.own_optimizer.param_groups:
                for parameter in group["params"]:
                    act(parameter)

    return edit


def clamp_gradient(parameter: nn.Parameter) -> None:
    if parameter.grad is not None:
        parameter.grad.clamp_(-1e-3, 1e-3)


ADAFACTOR = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
EDITS: dict[str, Edit] = {
    "nothing": Edit(),
    "clamp": Edit(after_step=clamp),
    "clamp-data": Edit(after_step=clamp_data),
    "replace-data": Edit(after_step=replace_data),
    "write-by-numpy": Edit(after_step=write_by_numpy),
    "normalize-in-step-hook": Edit(before_prepare=normalize_in_a_hook),
    "lookahead": Edit(after_step=lookahead),
    "average-for-evaluation": Edit(after_step=average_for_evaluation),
    "average-of-main-process": Edit(after_step=average_of_main_process),
    "main-process-evaluates": Edit(after_step=main_process_evaluates),
    "narrow-parameters": Edit(before_prepare=narrow_parameters),
    "swa": Edit(after_step=stochastic_average, at_end=end_with_average),
    "clamp-by-groups": Edit(after_step=by_groups(lambda parameter: parameter.clamp_(-0.05, 0.05))),
    "clamp-gradients-by-groups": Edit(optimizer=sgd, after_backward=by_groups(clamp_gradient)),
    "peft-lora-fa": Edit(adapts=True, optimizer=lora_fa),
    "peft-lora-plus": Edit(adapts=True, optimizer=lora_plus),
    "spectral-norm": Edit(before_pass=spectral_norm),
    "pruning-mask": Edit(after_step=prune),
    "noise-on-weights": Edit(after_step=noise_on_weights),
    "decay-by-hand": Edit(after_step=decay_by_hand),
    "reset-a-layer": Edit(after_step=reset_a_layer),
    "load-by-hand": Edit(after_step=load_by_hand),
    "vector-to-parameters": Edit(after_step=write_by_vector),
    "zero-biases": Edit(after_backward=zero_biases),
    "clip-adaptively": Edit(optimizer=sgd, after_backward=clip_adaptively),
    "skip-large-norms": Edit(optimizer=sgd, after_backward=skip_large_norms),
    "noise-on-gradients": Edit(after_backward=noise_on_gradients),
    "centralize": Edit(after_backward=centralize),
    "rates-by-norm": Edit(optimizer=sgd, after_step=rates_by_norm),
    "sign-of-gradients": Edit(optimizer=lambda model: sgd(model, lr=0.01), after_backward=replace_gradients),
    "sam": Edit(optimizer=lambda model: Sharpness(model.parameters(), lr=0.05), after_backward=sharpness),
    "clamp-in-tensor-hooks": Edit(optimizer=sgd, before_prepare=clamp_in_tensor_hooks),
    "gradient-penalty": Edit(loss=penalize_gradients),
    "weight-penalty": Edit(loss=penalize_weights),
    "unused-head": Edit(optimizer=decaying),
    "unused-then-used": Edit(optimizer=decaying, arguments=lambda step: {"head": int(step >= 4)}),
    "auxiliary-every-second-step": Edit(optimizer=decaying, arguments=lambda step: {"both": step % 2 == 1}),
    "auxiliary-with-sgd": Edit(
        optimizer=lambda model: sgd(model, weight_decay=0.1), arguments=lambda step: {"both": step % 2 == 1}
    ),
    "zeros-kept": Edit(
        optimizer=decaying,
        arguments=lambda step: {"both": step < 3},
        zero_grad={"set_to_none": False},
    ),
    "freeze-late": Edit(optimizer=decaying, after_step=freeze_late),
    "unfreeze-late": Edit(before_prepare=frozen_body, after_step=unfreeze_late),
    "unfreeze-gradually": Edit(before_prepare=all_frozen_but_head, after_step=unfreeze_gradually),
    "tie-late": Edit(after_step=tie_late),
    "add-late": Edit(after_step=add_late),
    "own-norm": Edit(optimizer=lambda model: ByOwnNorm(model.parameters(), lr=0.1)),
    "own-adam": Edit(optimizer=lambda model: OwnAdam(model.parameters(), lr=0.01)),
    "adagrad": Edit(optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02)),
    "nadam": Edit(optimizer=lambda model: torch.optim.NAdam(model.parameters(), lr=0.01)),
    "rmsprop": Edit(optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-3)),
    "adafactor": Edit(optimizer=of_package("transformers", "Adafactor", **ADAFACTOR)),
    "torch-adafactor": Edit(optimizer=lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01)),
    "timm-lamb": Edit(optimizer=of_package("timm.optim", "Lamb", lr=0.01)),
    "timm-adopt": Edit(optimizer=of_package("timm.optim", "Adopt", lr=0.01)),
    "timm-lion": Edit(optimizer=of_package("timm.optim", "Lion", lr=0.003)),
    "timm-lars": Edit(optimizer=of_package("timm.optim", "Lars", lr=0.1)),
    "timm-nadamw": Edit(optimizer=of_package("timm.optim", "NAdamW", lr=0.01)),
    "pytorch-optimizer-lamb": Edit(optimizer=of_package("pytorch_optimizer", "Lamb", lr=0.01)),
    "pytorch-optimizer-ademamix": Edit(optimizer=of_package("pytorch_optimizer", "AdEMAMix", lr=0.01)),
    "pytorch-optimizer-came": Edit(optimizer=of_package("pytorch_optimizer", "CAME", lr=0.01)),
    "pytorch-optimizer-sophia": Edit(optimizer=of_package("pytorch_optimizer", "Tiger", lr=0.003)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--edit", choices=EDITS, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--find-unused", action="store_true")
    parser.add_argument("--wide", action="store_true", help="with a weight that ZeRO-3 does not keep whole")
    args = parser.parse_args()
    edit = EDITS[args.edit]
    handlers = []
    if args.find_unused:
        from accelerate import DistributedDataParallelKwargs

        handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    accelerator = Accelerator(kwargs_handlers=handlers)
    set_seed(0)
    net: Any = Net(WIDE if args.wide else NARROW)
    if edit.adapts:
        from peft import LoraConfig, get_peft_model

        net = get_peft_model(
            net, LoraConfig(r=4, target_modules=["body.0", "body.2"], init_lora_weights=False)
        )
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    own = edit.optimizer(net)
    edit.before_prepare(net, own)
    loader = DataLoader(Samples(), args.batch_size)
    model, optimizer, loader = accelerator.prepare(net, own, loader)
    loop = Loop(accelerator, model, optimizer, own)
    edit.prepared(loop)
    losses = []
    for loop.step, (x, y) in zip(range(NUM_STEPS), loader, strict=False):
        edit.before_pass(loop)
        loop.kept["loss"] = lambda x=x, y=y: loss_of(edit, loop, x, y)
        loss = loop.kept["loss"]()
        accelerator.backward(loss)
        losses.append(accelerator.reduce(loss.detach().float(), reduction="mean").item())
        if not edit.after_backward(loop):
            optimizer.step()
        edit.after_step(loop)
        optimizer.zero_grad(**edit.zero_grad)
    edit.at_end(loop)
    weights = end_of(loop, is_written=edit.at_end is not nothing)
    out = Path("out")
    out.mkdir(exist_ok=True)
    if accelerator.is_main_process:
        # Clones: shared weights are saved under each of their names.
        save_file(
            {name: one.detach().float().clone() for name, one in weights.items()}, out / "end.safetensors"
        )
        save_file(start, out / "start.safetensors")
        (out / "losses.json").write_text(json.dumps(losses))


def end_of(loop: Loop, *, is_written: bool) -> dict[str, torch.Tensor]:
    """Return the weights; where ZeRO trains in 16 bits the fp32 copy, as others train and save theirs.

    What the edit has written in the end is in the weights alone.
    """
    weights = loop.accelerator.get_state_dict(loop.model)
    if (
        is_written
        or "DEEPSPEED" not in str(loop.accelerator.distributed_type)
        or loop.parameters[0].dtype == torch.float32
    ):
        return weights
    from deepspeed.utils import safe_get_full_fp32_param

    named = loop.net.named_parameters()
    return {name: safe_get_full_fp32_param(one).cpu() for name, one in named if one.requires_grad}


def loss_of(edit: Edit, loop: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.to(loop.parameters[0].dtype)  # DeepSpeed makes the model bf16, and casts no inputs
    if edit.loss is not None:
        return edit.loss(loop, x, y)
    return ((loop.model(x, **edit.arguments(loop.step)).float() - y) ** 2).mean()


if __name__ == "__main__":
    main()
