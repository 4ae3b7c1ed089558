"""The table: one entry for each optimizer class. Whoever adds an optimizer adds a line here.

`tests/core/test_optimizers.py` compares each entry with the libraries, and runs it through every reader: the
names of classes, of Trainer and of DeepSpeed's file, a plan's memory, the rules, the swap. What an optimizer
does under ZeRO and offload follows from its entry by the rows of `checking/rules/optimizer/table.py`, which
`make evidence` measures.
"""

from __future__ import annotations

from typing import Any

from zerofit.core.optimizers import memory as of
from zerofit.core.optimizers.entry import Device, OptimizerEntry, Replacement, Swap, Update, Variant
from zerofit.core.strategy import OptimizerName

LIBRARIES = {
    "torch": ("torch.optim",),
    "bitsandbytes": ("bitsandbytes.optim",),
    "deepspeed": ("deepspeed.ops", "deepspeed.runtime.zero.muon", "deepspeed.runtime.fp16"),
    "torchao": ("torchao.optim", "torchao.prototype.low_bit_optim"),
    "schedulefree": ("schedulefree",),
    "apex": ("apex.optimizers",),
}
"""Packages whose classes are optimizers, by the library that their ids begin with."""
NOT_TAKEN_OVER = ("amsgrad", "maximize")
"""Options that change the result and that no replacement supports: neither bitsandbytes' AdamW8bit nor
DeepSpeedCPUAdam (deepspeed 0.19.8, ops/adam/cpu_adam.py: amsgrad is unsupported, maximize unknown)."""
_ADAM = frozenset({"betas", "eps"})
_AMSGRAD = ("amsgrad",)


def _entry(id: str, **known: Any) -> OptimizerEntry:  # noqa: A002
    return OptimizerEntry(id=id, **known)


_FUSED = (Variant(when=("fused",), memory=of.FUSED_ADAMW),)
_FOREACH = {"memory": of.FOREACH_ADAMW, "variants": _FUSED}
_ONE_STATE = {"memory": of.ONE_STATE, "is_exact": False}
_ADAM_OF_TORCH = {"swap": Swap.SAME, "is_tested": True, "is_converted": True}
_TORCH = (
    _entry(
        "torch.AdamW",
        trainer=("adamw_torch", "adamw_torch_fused"),
        replacement=Replacement(
            name=OptimizerName.ADAMW,
            label="fused AdamW",
            module="torch.optim.adamw",
            class_name="AdamW",
            memory=of.FUSED_ADAMW,
            trainer="adamw_torch_fused",
            trainer_alike=frozenset({"adamw_torch", "adamw_torch_fused"}),
            keeps=_ADAM,
        ),
        **_FOREACH,
        more_states=_AMSGRAD,
        **_ADAM_OF_TORCH,
    ),
    _entry("torch.Adam", **_FOREACH, more_states=_AMSGRAD, **_ADAM_OF_TORCH),
    _entry(
        "torch.SGD",
        trainer=("sgd",),
        replacement=Replacement(
            name=OptimizerName.SGD,
            label="SGD",
            module="torch.optim.sgd",
            class_name="SGD",
            memory=of.SGD,
            trainer="sgd",
            trainer_alike=frozenset({"sgd"}),
            keeps=frozenset({"momentum", "dampening", "nesterov"}),
        ),
        memory=of.SGD,
        variants=(
            Variant(when=("momentum", "weight_decay"), memory=of.ONE_STATE),
            Variant(when=("momentum",), memory=of.MOMENTUM),
            Variant(
                when=("weight_decay",), unless=(("foreach", False), ("fused", True)), memory=of.DECAYED_SGD
            ),
        ),
    ),
    _entry("torch.RMSprop", trainer=("rmsprop",), **_ONE_STATE, more_states=("centered", "momentum")),
    _entry(
        "torch.Adagrad",
        trainer=("adagrad",),
        **_ONE_STATE,
        swap=Swap.FAILS_AS_ADAGRAD,
        is_tested=True,
        is_rebuilt=True,
    ),
    _entry(
        "torch.Adafactor",
        fails_on_dtensors=True,
        memory=of.ADAFACTOR,
        is_exact=False,
        update=Update.WHOLE_TENSOR,
        swap=Swap.FAILS_ON_EPS,
    ),
    _entry("torch.Muon", **_ONE_STATE, update=Update.MATRIX),
    _entry("torch.NAdam", **_FOREACH, is_exact=False),
    _entry("torch.RAdam", **_FOREACH, is_exact=False),
    _entry("torch.Adamax", **_FOREACH, is_exact=False),
    _entry("torch.Adadelta", **_FOREACH, is_exact=False),
    _entry("torch.ASGD", **_ONE_STATE),
    _entry("torch.Rprop", **_FOREACH, is_exact=False, fails_on_dtensors=True),
    _entry("torch.LBFGS", needs_closure=True),
    _entry(
        "transformers.Adafactor",
        fails_on_dtensors=True,
        classes=("transformers.Adafactor", "transformers.optimization.Adafactor"),
        trainer=("adafactor",),
        replacement=Replacement(
            name=OptimizerName.ADAFACTOR,
            label="Adafactor",
            module="transformers.optimization",
            class_name="Adafactor",
            memory=of.ADAFACTOR,
            trainer="adafactor",
            trainer_alike=frozenset({"adafactor"}),
        ),
        memory=of.ADAFACTOR,
        update=Update.WHOLE_TENSOR,
        swap=Swap.FAILS_ON_EPS,
    ),
)


_SHARED = ("memory", "variants", "is_exact", "update", "swap")


def _family(
    name: str, *, wide: dict[str, Any], narrow: dict[str, Any], with_32: dict[str, Any] | None = None
) -> list[OptimizerEntry]:
    """Return the three classes of one of bitsandbytes' optimizers: as it is, with 8bit and with 32bit.

    Args:
        wide: of the class without a number of bits, which has 32. A capture names it with 8bit if it was made
            with optim_bits=8.
        narrow: of the class with 8 bits.
        with_32: what the class with 32bit does not share with the one without a number.
    """
    shared = {key: value for key, value in wide.items() if key in _SHARED}
    return [
        _entry(f"bitsandbytes.{name}", **wide),
        _entry(f"bitsandbytes.{name}8bit", **{"update": Update.BLOCK, **narrow}),
        _entry(f"bitsandbytes.{name}32bit", **{**shared, **(with_32 or {})}),
    ]


def _bitsandbytes(
    name: OptimizerName,
    label: str,
    class_name: str,
    memory: of.OptimizerMemory,
    trainer: str,
    *alike: str,
    bits: int,
) -> Replacement:
    family = "lion" if "Lion" in class_name else "adamw"
    return Replacement(
        name=name,
        label=label,
        module=f"bitsandbytes.optim.{family}",
        class_name=class_name,
        memory=memory,
        trainer=trainer,
        trainer_alike=frozenset({trainer, *alike}),
        keeps=frozenset({"betas"}) if family == "lion" else _ADAM,
        bits=bits,
        is_paged="paged" in name,
    )


_PAGED_8BIT, _LION_PAGED_8BIT = "paged_adamw_8bit", "paged_lion_8bit"
_ONE_WIDE = {"wide": _ONE_STATE, "narrow": {"memory": of.LION_8BIT, "is_exact": False}}
_WHOLE = {"update": Update.WHOLE_TENSOR}
_THREE_BETAS = {"swap": Swap.FAILS_ON_BETAS}


def _in_pages(memory: of.OptimizerMemory) -> tuple[Variant]:
    """Return the memory of a class made with is_paged=True, as Trainer makes all paged ones."""
    return (Variant(when=("is_paged",), memory=memory),)


_BITSANDBYTES = (
    *_family(
        "AdamW",
        # AdamW(is_paged=True), as Trainer makes it: accelerate treats it as AdamW, unlike PagedAdamW.
        wide={
            "trainer": ("paged_adamw_32bit",),
            "memory": of.ADAMW_32BIT,
            "swap": Swap.SAME,
            "variants": _in_pages(of.PAGED_ADAMW),
        },
        narrow={
            "trainer": ("adamw_bnb_8bit", "adamw_8bit"),
            "replacement": _bitsandbytes(
                OptimizerName.ADAMW_8BIT,
                "8-bit AdamW",
                "AdamW8bit",
                of.ADAMW_8BIT,
                "adamw_bnb_8bit",
                "adamw_8bit",
                _PAGED_8BIT,
                bits=8,
            ),
            "memory": of.ADAMW_8BIT,
            "swap": Swap.ADAM,
            "variants": _in_pages(of.PAGED_ADAMW_8BIT),
        },
    ),
    *_family(
        "PagedAdamW",
        wide={
            # Made as AdamW(is_paged=True), which accelerate replaces by CPU Adam under offload: nothing would
            # be paged.
            "replacement": _bitsandbytes(
                OptimizerName.PAGED_ADAMW,
                "paged AdamW",
                "AdamW",
                of.PAGED_ADAMW,
                "paged_adamw_32bit",
                bits=32,
            ),
            "memory": of.PAGED_ADAMW,
            "swap": Swap.ADAM,
        },
        narrow={
            "trainer": (_PAGED_8BIT,),
            "replacement": _bitsandbytes(
                OptimizerName.PAGED_ADAMW_8BIT,
                "paged 8-bit AdamW",
                "PagedAdamW8bit",
                of.PAGED_ADAMW_8BIT,
                _PAGED_8BIT,
                bits=8,
            ),
            "memory": of.PAGED_ADAMW_8BIT,
            "swap": Swap.ADAM,
        },
    ),
    *_family(
        "Adam",
        wide={
            "memory": of.ADAMW_32BIT,
            "swap": Swap.SAME_WITHOUT_DECAY,
            "variants": _in_pages(of.PAGED_ADAMW),
        },
        narrow={"memory": of.ADAMW_8BIT, "swap": Swap.ADAM},
    ),
    *_family(
        "PagedAdam",
        wide={"memory": of.PAGED_ADAMW, "swap": Swap.SAME_WITHOUT_DECAY},
        narrow={"memory": of.PAGED_ADAMW_8BIT, "swap": Swap.ADAM},
    ),
    *_family(
        "Lion",
        wide={
            # Likewise Lion(is_paged=True).
            "trainer": ("lion_32bit", "paged_lion_32bit"),
            "replacement": _bitsandbytes(OptimizerName.LION, "Lion", "Lion", of.LION, "lion_32bit", bits=32),
            "memory": of.LION,
            "swap": Swap.FAILS_AS_LION,
        },
        narrow={
            "trainer": ("lion_8bit",),
            "replacement": _bitsandbytes(
                OptimizerName.LION_8BIT,
                "8-bit Lion",
                "Lion8bit",
                of.LION_8BIT,
                "lion_8bit",
                _LION_PAGED_8BIT,
                bits=8,
            ),
            "memory": of.LION_8BIT,
            "variants": _in_pages(of.PAGED_LION_8BIT),
        },
    ),
    *_family(
        "PagedLion",
        wide={"memory": of.LION},  # its pages are counted as if they stayed on the GPU
        narrow={
            "trainer": (_LION_PAGED_8BIT,),
            "replacement": _bitsandbytes(
                OptimizerName.PAGED_LION_8BIT,
                "paged 8-bit Lion",
                "PagedLion8bit",
                of.PAGED_LION_8BIT,
                _LION_PAGED_8BIT,
                bits=8,
            ),
            "memory": of.PAGED_LION_8BIT,
        },
    ),
    *_family("LAMB", wide={"memory": of.ADAMW_32BIT, **_WHOLE}, narrow={"memory": of.ADAMW_8BIT, **_WHOLE}),
    # Those with 32 in their names keep two states, and read a third (bitsandbytes 0.50.2, optim/ademamix.py).
    *_family(
        "AdEMAMix",
        wide={
            "trainer": ("ademamix",),
            "memory": of.ADEMAMIX,
            "variants": _in_pages(of.PAGED_ADEMAMIX),
            **_THREE_BETAS,
        },
        narrow={
            "trainer": ("ademamix_8bit",),
            "memory": of.ADEMAMIX_8BIT,
            "variants": _in_pages(of.PAGED_ADEMAMIX_8BIT),
            **_THREE_BETAS,
        },
        with_32={"device": Device.GPU, "memory": of.ADAMW_32BIT, "variants": ()},
    ),
    *_family(
        "PagedAdEMAMix",
        wide={"trainer": ("paged_ademamix_32bit",), "memory": of.PAGED_ADEMAMIX, **_THREE_BETAS},
        narrow={"trainer": ("paged_ademamix_8bit",), "memory": of.PAGED_ADEMAMIX_8BIT, **_THREE_BETAS},
        with_32={"device": Device.GPU, "memory": of.PAGED_ADAMW},
    ),
    *_family(
        "LARS",
        wide={**_ONE_STATE, **_WHOLE, "swap": Swap.UNBOUNDED},
        narrow={"memory": of.LION_8BIT, "is_exact": False, **_WHOLE, "swap": Swap.UNBOUNDED},
    ),
    *_family(
        "RMSprop",
        wide={**_ONE_STATE, "trainer": ("rmsprop_bnb", "rmsprop_bnb_32bit")},
        narrow={"memory": of.LION_8BIT, "trainer": ("rmsprop_bnb_8bit",)},
    ),
    *_family(
        "Adagrad",
        wide={**_ONE_STATE, "swap": Swap.FAILS_AS_ADAGRAD},
        narrow={"memory": of.LION_8BIT, "is_exact": False},
    ),
    *_family(
        "SGD",
        wide={**_ONE_STATE, "swap": Swap.UNBOUNDED},
        narrow={"memory": of.LION_8BIT, "is_exact": False, "swap": Swap.UNBOUNDED},
    ),
)
_ADAM_OF_DEEPSPEED = {"memory": of.FUSED_ADAMW, "is_tested": True, "is_converted": True}
_DEEPSPEED = (
    _entry("deepspeed.DeepSpeedCPUAdam", **_ADAM_OF_DEEPSPEED, device=Device.CPU, swap=Swap.ADAM),
    _entry("deepspeed.FusedAdam", **_ADAM_OF_DEEPSPEED, swap=Swap.ADAM),
    _entry("deepspeed.DeepSpeedCPUAdagrad", **_ONE_STATE, device=Device.CPU, is_tested=True),
    _entry("deepspeed.DeepSpeedCPULion", memory=of.LION, device=Device.CPU, is_tested=True),
    _entry("deepspeed.FusedLion", memory=of.LION, device=Device.GPU, is_tested=True),
    _entry("deepspeed.FusedLamb", memory=of.ADAMW_32BIT, device=Device.GPU, update=Update.WHOLE_TENSOR),
    _entry(
        "deepspeed.MuonWithAuxAdam",
        memory=of.FOREACH_ADAMW,
        variants=(Variant(when=("use_muon",), memory=of.ONE_STATE),),
        is_exact=False,
        is_tested=True,
        is_too_slow=True,  # it compiles
    ),
)


def _config(kind: str, of_class: str = "", **known: Any) -> OptimizerEntry:
    """Return what optimizer.type makes: DeepSpeed's own optimizer, or the class of torch.optim."""
    made = _BY_ID[of_class or f"torch.{kind}"]
    shared = {
        "memory": made.memory,
        "variants": made.variants,
        "is_exact": made.is_exact,
        "update": made.update,
    }
    return _entry(f"config.{kind}", **{**shared, **known})


_BY_ID = {entry.id: entry for entry in (*_TORCH, *_BITSANDBYTES, *_DEEPSPEED)}
_CONFIG = (
    # adam_w_mode is true by default, whatever the type.
    _config("Adam", "deepspeed.FusedAdam", same_as="torch.AdamW", is_tested=True, ignores_case=True),
    _config("AdamW", "deepspeed.FusedAdam", same_as="torch.AdamW", is_tested=True, ignores_case=True),
    _config("Adagrad", is_tested=True, is_rebuilt=True, ignores_case=True),
    _config("Lion", "deepspeed.FusedLion", is_tested=True, ignores_case=True),
    _config("Lamb", "deepspeed.FusedLamb", ignores_case=True),
    # Weights outside of matrices are stepped by an Adam (deepspeed/runtime/zero/muon/muon_optimizer.py).
    _config("Muon", "deepspeed.MuonWithAuxAdam", is_tested=True, ignores_case=True),
    *(_config(kind) for kind in ("SGD", "Adafactor", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")),
    *(_config(kind) for kind in ("ASGD", "Rprop")),
    _config("LBFGS", needs_closure=True),
    _entry("config.SparseAdam"),
    *(_entry(f"config.{kind}", package="mup", ignores_case=True) for kind in ("MuAdam", "MuAdamW", "MuSGD")),
    # Up to 0.19.6 (deepspeed/runtime/config.py, DEEPSPEED_OPTIMIZERS), and only without ZeRO.
    *(
        _entry(f"config.{kind}", until="0.19.7", ignores_case=True)
        for kind in ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")
    ),
)
"""What DeepSpeed creates from optimizer.type: its own, and any class of torch.optim."""


_LOW_RANK = tuple(
    _entry(
        f"{library}.{name}",
        classes=(f"{library}.{name}", f"{library}.{defined}"),
        trainer=trainer,
        update=Update.MATRIX,
        package=library.replace("_", "-"),
    )
    for library, name, defined, trainer in (
        ("galore_torch", "GaLoreAdamW", "adamw.AdamW", ("galore_adamw", "galore_adamw_layerwise")),
        (
            "galore_torch",
            "GaLoreAdamW8bit",
            "adamw8bit.AdamW8bit",
            ("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
        ),
        (
            "galore_torch",
            "GaLoreAdafactor",
            "adafactor.Adafactor",
            ("galore_adafactor", "galore_adafactor_layerwise"),
        ),
        ("apollo_torch", "APOLLOAdamW", "apollo.AdamW", ("apollo_adamw", "apollo_adamw_layerwise")),
        ("apollo_torch", "QAPOLLOAdamW", "q_apollo.AdamW", ()),
    )
)
"""They project matrices to a low rank: their groups with a rank fail on flat shards. Run once by hand, on two
CPU ranks at stages 2 and 3: "IndexError: tuple index out of range" (galore-torch 1.0, apollo-torch 1.0.3)."""

# Run once by hand likewise: off by 2.9e-3 with torchao 0.18.0, by 1.2e-6 with schedule-free 1.4.1 in train
# mode, the only one in which ZeRO's weights are the optimizer's. With amsgrad torchao's first step fails: its
# states have no aten.maximum.
_TORCHAO_TRAITS = {"update": Update.BLOCK, "package": "torchao", "swap": Swap.ADAM}
_TWO_SETS = {
    "memory": of.FOREACH_ADAMW,
    "is_exact": False,
    "update": Update.TWO_WEIGHTS,
    "package": "schedulefree",
}
_DUMMY = ("accelerate.utils.DummyOptim", "accelerate.utils.deepspeed.DummyOptim")
_TORCHAO = tuple(
    _entry(f"torchao.{name}{bits}", trainer=trainer, memory=memory, **_TORCHAO_TRAITS)
    for name in ("AdamW", "Adam")
    for bits, memory, trainer in (
        ("4bit", of.TORCHAO_4BIT, ("adamw_torch_4bit",) if name == "AdamW" else ()),
        ("8bit", of.TORCHAO_8BIT, ("adamw_torch_8bit",) if name == "AdamW" else ()),
        ("Fp8", of.TORCHAO_FP8, ()),
    )
)
_OTHERS = (
    *_TORCHAO,
    # Its own copies on the host are what it steps, so that DeepSpeed has nothing to partition.
    _entry("torchao.CPUOffloadOptimizer", memory=of.CPU_OFFLOAD, package="torchao", device=Device.GPU),
    _entry("schedulefree.AdamWScheduleFree", trainer=("schedule_free_adamw",), **_TWO_SETS),
    _entry("schedulefree.RAdamScheduleFree", trainer=("schedule_free_radam",), **_TWO_SETS),
    _entry("schedulefree.SGDScheduleFree", trainer=("schedule_free_sgd",), **{**_TWO_SETS, **_ONE_STATE}),
    *_LOW_RANK,
    _entry("apex.FusedAdam", memory=of.FUSED_ADAMW, is_tested=True, device=Device.GPU, package="apex"),
    _entry(
        "apex.FusedLAMB",
        memory=of.ADAMW_32BIT,
        update=Update.WHOLE_TENSOR,
        device=Device.GPU,
        package="apex",
    ),
    _entry("apex.FusedSGD", memory=of.MOMENTUM, device=Device.GPU, package="apex"),
)
_NAMES_ALONE = tuple(
    _entry(f"other:{paths[0]}", classes=tuple(paths), trainer=(name,))
    for name, *paths in (
        ("adamw_torch_xla", "torch_xla.amp.syncfree.AdamW"),
        ("adamw_torch_npu_fused", "torch_npu.optim.NpuFusedAdamW"),
        ("adamw_anyprecision", "torchdistx.optimizers.AnyPrecisionAdamW"),
        ("lomo", "lomo_optim.Lomo", "lomo_optim.lomo.Lomo"),
        ("adalomo", "lomo_optim.AdaLomo", "lomo_optim.adalomo.AdaLomo"),
        ("grokadamw", "grokadamw.GrokAdamW", "grokadamw.grokadamw.GrokAdamW"),
        ("stable_adamw", "optimi.StableAdamW", "optimi.stableadamw.StableAdamW"),
    )
)
ENTRIES: tuple[OptimizerEntry, ...] = (
    *_TORCH,
    *_BITSANDBYTES,
    *_DEEPSPEED,
    _entry("accelerate.DummyOptim", classes=_DUMMY),
    *_CONFIG,
    *_OTHERS,
    *_NAMES_ALONE,
)
"""The table, in the order in which docs/reference/optimizers.md shows it."""
