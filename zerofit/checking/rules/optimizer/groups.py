"""The optimizers of the table by id, and what groups of them have in common."""

from __future__ import annotations

_BITS = ("", "8bit", "32bit")


def _family(*names: str, bits: tuple[str, ...] = _BITS) -> tuple[str, ...]:
    return tuple(f"bitsandbytes.{name}{suffix}" for name in names for suffix in bits)


TORCH = tuple(
    f"torch.{name}"
    for name in (
        *("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adafactor", "Muon", "NAdam", "RAdam", "Adamax"),
        *("Adadelta", "ASGD", "Rprop", "LBFGS"),
    )
)
BITSANDBYTES = _family(
    *("AdamW", "PagedAdamW", "Adam", "PagedAdam", "Lion", "PagedLion", "LAMB", "AdEMAMix", "PagedAdEMAMix"),
    *("LARS", "RMSprop", "Adagrad", "SGD"),
)
"""Those without a number of bits are in 32 bits unless optim_bits=8 says otherwise."""
OF_DEEPSPEED = tuple(
    f"deepspeed.{name}"
    for name in (
        *("DeepSpeedCPUAdam", "FusedAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"),
        "FusedLamb",
    )
)
OF_CONFIG = tuple(
    f"config.{name}"
    for name in (
        *(
            "Adam",
            "AdamW",
            "Adagrad",
            "Lion",
            "Lamb",
            "Muon",
            "SGD",
            "Adafactor",
            "RMSprop",
            "NAdam",
            "RAdam",
        ),
        *("Adamax", "Adadelta", "ASGD", "Rprop", "LBFGS", "SparseAdam"),
    )
)
"""What DeepSpeed makes of optimizer.type: its own kinds, and any class of torch.optim."""
CONFIG_WITH_MUP = ("config.MuAdam", "config.MuAdamW", "config.MuSGD")
CONFIG_REMOVED = ("config.OneBitAdam", "config.ZeroOneAdam", "config.OneBitLamb")
"""DeepSpeed had them once."""
OPTIMIZERS = (
    *TORCH,
    "transformers.Adafactor",
    *BITSANDBYTES,
    *OF_DEEPSPEED,
    "accelerate.DummyOptim",
    *OF_CONFIG,
    *CONFIG_WITH_MUP,
    *CONFIG_REMOVED,
)
"""Every id that the table knows."""

EIGHT_BIT = tuple(name for name in BITSANDBYTES if name.endswith("8bit"))
WHOLE_TENSORS = (
    *("torch.Adafactor", "transformers.Adafactor", "config.Adafactor", "deepspeed.FusedLamb", "config.Lamb"),
    *_family("LAMB", "LARS"),
)
"""They step by norms or factors of whole tensors."""
ADEMAMIX = _family("AdEMAMix", "PagedAdEMAMix")
TORCH_ADAGRAD = ("torch.Adagrad", "config.Adagrad")
SWAPPED_RIGHT = ("torch.AdamW", "torch.Adam", *_family("AdamW", bits=("", "32bit")))
"""DeepSpeed's CPU Adam in their place computes the same."""
SWAPPED_RIGHT_WITHOUT_DECAY = _family("Adam", "PagedAdam", bits=("", "32bit"))
"""bitsandbytes decays with Adam as with AdamW, and DeepSpeed's CPU Adam in their place does not."""
SWAPPED_UNBOUNDED = _family("LARS", "SGD")
"""Their groups have an eps of 0, by which DeepSpeed's CPU Adam divides."""
SWAPPED_FOR_ADAGRAD = ("torch.Adagrad", *_family("Adagrad", bits=("", "32bit")))
SWAPPED_FOR_LION = _family("Lion", bits=("", "32bit"))
TESTED = (
    *("torch.AdamW", "torch.Adam", "torch.Adagrad"),
    *(name for name in OF_DEEPSPEED if name != "deepspeed.FusedLamb"),
    *("config.Adam", "config.AdamW", "config.Adagrad", "config.Lion", "config.Muon"),
)
"""DeepSpeed takes them with ZeRO unasked (deepspeed/runtime/zero/utils.py)."""


def in_group(optimizer: str, group: tuple[str, ...]) -> bool:
    """Return whether an id is in a group, where "torch.*" stands for all that begin so, and "*" for all."""
    return optimizer in group or any(
        name.endswith("*") and optimizer.startswith(name.removesuffix("*")) for name in group
    )
