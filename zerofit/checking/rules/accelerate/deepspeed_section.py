"""Rules of what accelerate's file and Accelerator() ask of DeepSpeed beside a DeepSpeed file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import (
    DEEPSPEED_SECTION,
    DYNAMO_BACKEND,
    IN_DEEPSPEED_FILE,
    launch_of,
    launch_of_deepspeed,
    launch_value,
    named_deepspeed_file,
    whether_deepspeed,
)
from zerofit.checking.rule import Effect, Evidence, Example, Hit, Rule, Severity, hit_at
from zerofit.configs.document import RemoveKey, SetValue, say
from zerofit.core.command import Route
from zerofit.core.setting import Place, Said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.accelerate import LaunchLayers
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit
    from zerofit.scripts.facts import Keyword, ScriptFacts

_SOURCE = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate"
_PLUGIN = f"{_SOURCE}/utils/dataclasses.py"
_FILE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 1,
}
_NAMED = {**_FILE, DEEPSPEED_SECTION: {"deepspeed_config_file": "ds_config.json"}}
_ZERO2 = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def _keys_beside_file(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    named = named_deepspeed_file(found[0]) if found else None
    if found is None or named is None or (file := found[0].file) is None:
        return
    command = found[0].command
    is_said_by_flag = command is not None and command.find("mixed_precision") is not None
    paths = [(DEEPSPEED_SECTION, key) for key in IN_DEEPSPEED_FILE]
    for path in paths if is_said_by_flag else [*paths, ("mixed_precision",)]:
        entry = file.at(*path)
        if entry is None or (path == ("mixed_precision",) and entry.plain is None):
            continue
        yield hit_at(
            file,
            path,
            found=f"{say(file, *path)} beside {named.text}",
            fix=_where_it_belongs(path),
            edits=_move(file, situation.deepspeed, path, entry.plain),
        )


def _where_it_belongs(path: tuple[str, ...]) -> str:
    if path == ("mixed_precision",):
        return "take the key out, and choose bf16.enabled or fp16.enabled in the DeepSpeed file"
    return f"take the key out, and write {'.'.join(IN_DEEPSPEED_FILE[path[-1]])} in the DeepSpeed file"


def _move(file: Document, deepspeed: Document | None, path: tuple[str, ...], value: Any) -> tuple[Edit, ...]:
    """Return the edits where taking the key out changes nothing that was asked for."""
    if deepspeed is None:
        return ()
    take_out = RemoveKey(document=file.name, path=path)
    if path == ("mixed_precision",):
        is_on = any(deepspeed.value(key, "enabled") not in (None, False) for key in ("bf16", "fp16"))
        # No edit for a value without quotes: the rule of types puts quotes around it first.
        return (take_out,) if value == "no" and not is_on else ()
    target = IN_DEEPSPEED_FILE[path[-1]]
    there = deepspeed.at(*target)
    if there is not None:
        return (take_out,) if there.plain == value else ()
    if value in (None, "none"):
        return (take_out,)
    if len(target) == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        return (SetValue(document=deepspeed.name, path=target, value=value), take_out)
    return ()


def _section_without_deepspeed(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    deepspeed = whether_deepspeed(launch) if launch else None
    if launch is None or launch.file is None or deepspeed is None or deepspeed.value:
        return
    # A flag that says otherwise has a rule of its own.
    if launch.file.value(DEEPSPEED_SECTION) and deepspeed.place is not None:
        yield Hit(found=f"{deepspeed.text} with {DEEPSPEED_SECTION}", place=deepspeed.place)


def _use_cpu_with_deepspeed(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    if found is not None and found[0].file is not None and found[0].file.value("use_cpu") is True:
        yield hit_at(found[0].file, ("use_cpu",), found[1].text)


def _nvme_folder_is_lost(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    if found is None or named_deepspeed_file(found[0]) is not None:
        return
    for part in ("optimizer", "param"):
        device = launch_value(found[0], f"offload_{part}_device")
        folder = launch_value(found[0], f"offload_{part}_nvme_path")
        if device is not None and str(device.value).lower() == "nvme":
            told = f" with {folder.text}" if folder else ""
            yield Hit(found=f"{device.text}{told}", place=device.place)


def _zero_clipping_is_lost(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    clipping = launch_value(found[0], "gradient_clipping") if found else None
    if found is None or clipping is None or named_deepspeed_file(found[0]) is not None:
        return
    try:
        is_off = float(clipping.value) == 0
    except (TypeError, ValueError, OverflowError):
        return
    if is_off:
        yield Hit(found=clipping.text, place=clipping.place)


def _dynamo_is_ignored(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    for said in _dynamo_backends(found[0]) if found else ():
        if found and isinstance(said.value, str) and said.value.upper() not in ("", "NO"):
            yield Hit(found=f"{said.text} with {found[1].text}", place=said.place)


def _dynamo_backends(launch: LaunchLayers) -> Iterator[Said[Any]]:
    """Yield the backend of torch.compile that the flags or, without one, the file choose."""
    flag = launch.command.find("dynamo_backend") if launch.command else None
    if flag is not None:
        yield Said(value=flag.value, text=flag.text)
        return
    for path in DYNAMO_BACKEND:
        said = launch.file.said(*path) if launch.file else None
        if said is not None:
            yield said


_DATACLASSES = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
_ACCELERATOR = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/accelerator.py"
_STEPS = "gradient_accumulation_steps"


def _script_with_accelerator(situation: Situation) -> tuple[ScriptFacts, Document] | None:
    if situation.script is None or situation.deepspeed is None or situation.route is not Route.ACCELERATE:
        return None
    return situation.script, situation.deepspeed


def _steps_of(script: ScriptFacts) -> tuple[Keyword, int] | None:
    """Return the number of steps in Accelerator(...) and where it stands."""
    for keyword in script.accelerator_keywords:
        if keyword.name == _STEPS and type(keyword.value) is int:
            return keyword, keyword.value
    return None


def _steps_missing(situation: Situation) -> Iterator[Hit]:
    found = _script_with_accelerator(situation)
    steps = _steps_of(found[0]) if found else None
    if found is None or steps is None or steps[1] == 1 or found[1].at(_STEPS) is not None:
        return
    script, file = found
    yield Hit(
        found=f"Accelerator({steps[0].text}) with no {_STEPS} in {file.name}",
        place=_place(script, steps[0]),
        edits=(SetValue(document=file.name, path=(_STEPS,), value="auto"),),
        confidence=steps[0].confidence,
    )


def _steps_differ(situation: Situation) -> Iterator[Hit]:
    found = _script_with_accelerator(situation)
    steps = _steps_of(found[0]) if found else None
    if found is None or steps is None:
        return
    script, file = found
    value = file.value(_STEPS)
    if isinstance(value, int) and value != steps[1]:
        yield Hit(
            found=f"Accelerator({steps[0].text}) with {say(file, _STEPS)} in {file.name}",
            place=_place(script, steps[0]),
            confidence=steps[0].confidence,
        )


def _place(script: ScriptFacts, keyword: Keyword) -> Place:
    return Place(file=script.name, line=keyword.line, column=keyword.column)


_FOUR = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(gradient_accumulation_steps=4)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    with accelerator.accumulate(model):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""
_TWO_SAMPLES: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}


RULES = (
    Rule(
        id="accelerate-keys-beside-deepspeed-file",
        severity=Severity.ERROR,
        summary="accelerate refuses these keys beside deepspeed_config_file",
        why="a DeepSpeed file has the last word on them, and accelerate takes a second source for a mistake",
        fix="take the keys out, and say it in the DeepSpeed file",
        see=_PLUGIN,
        find=_keys_beside_file,
        bad=Example(deepspeed=_ZERO2, accelerate={**_NAMED, "mixed_precision": "no"}),
        good=Example(deepspeed=_ZERO2, accelerate=_NAMED),
        evidence=Evidence(
            outcome=Effect.FAILS, says="the following accelerate config variables will be ignored"
        ),
    ),
    Rule(
        id="deepspeed-section-without-deepspeed",
        severity=Severity.WARNING,
        summary="accelerate's file sets DeepSpeed up and does not use it",
        why="only distributed_type decides what runs; the section alone does nothing",
        fix="write distributed_type: DEEPSPEED, or take deepspeed_config out",
        see=f"{_SOURCE}/commands/launch.py",
        find=_section_without_deepspeed,
        bad=Example(
            accelerate={**_FILE, "distributed_type": "MULTI_GPU", DEEPSPEED_SECTION: {"zero_stage": 2}}
        ),
        good=Example(accelerate={**_FILE, DEEPSPEED_SECTION: {"zero_stage": 2}}),
        evidence=Evidence(outcome=Effect.IGNORED, observed=(("zero_stage", None),)),
    ),
    Rule(
        id="use-cpu-with-deepspeed",
        severity=Severity.WARNING,
        summary="accelerate ignores use_cpu under DeepSpeed",
        why="the launcher does not pass it on with DeepSpeed: the ranks take GPUs where there are any",
        fix="rehearse with `zerofit launch --cpu`, or take use_cpu out",
        see=f"{_SOURCE}/utils/launch.py",
        find=_use_cpu_with_deepspeed,
        bad=Example(accelerate={**_FILE, "use_cpu": True, DEEPSPEED_SECTION: {"zero_stage": 2}}),
        good=Example(accelerate={**_FILE, "use_cpu": False, DEEPSPEED_SECTION: {"zero_stage": 2}}),
        evidence=Evidence(outcome=Effect.IGNORED, not_reproduced="needs a GPU"),
    ),
    Rule(
        id="accelerate-loses-nvme-path",
        severity=Severity.ERROR,
        summary="offload to NVMe needs a DeepSpeed file: accelerate does not pass the folder on",
        why="the launcher drops the folder, and DeepSpeed writes to a folder named none where it stands",
        fix="write a DeepSpeed file with device nvme and nvme_path, and name it with deepspeed_config_file",
        see=f"{_SOURCE}/utils/launch.py",
        find=_nvme_folder_is_lost,
        bad=Example(
            accelerate={
                **_FILE,
                DEEPSPEED_SECTION: {
                    "zero_stage": 3,
                    "offload_optimizer_device": "nvme",
                    "offload_optimizer_nvme_path": "/local_nvme",
                },
            }
        ),
        good=Example(
            accelerate=_NAMED,
            deepspeed={
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {
                    "stage": 3,
                    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme"},
                },
            },
        ),
        evidence=Evidence(
            outcome=Effect.IGNORED, observed=(("engine.zero_offload_optimizer.nvme_path", "none"),)
        ),
    ),
    Rule(
        id="accelerate-loses-zero-clipping",
        severity=Severity.WARNING,
        summary="accelerate takes a gradient clipping of 0 for none said, and DeepSpeed then clips at 1.0",
        why="the plugin leaves a clipping of 0 out of DeepSpeed's configuration, where the default is 1.0",
        fix="write a DeepSpeed file with gradient_clipping 0, and name it with deepspeed_config_file",
        see=_PLUGIN,
        find=_zero_clipping_is_lost,
        bad=Example(accelerate={**_FILE, DEEPSPEED_SECTION: {"zero_stage": 2, "gradient_clipping": 0}}),
        good=Example(accelerate=_NAMED, deepspeed={**_ZERO2, "gradient_clipping": 0.0}),
        evidence=Evidence(outcome=Effect.IGNORED, observed=(("gradient_clipping", 1.0),)),
    ),
    Rule(
        id="dynamo-ignored-with-deepspeed",
        severity=Severity.WARNING,
        summary="accelerate launch does not hand its dynamo settings on where DeepSpeed runs",
        why="with DeepSpeed the launcher leaves ACCELERATE_DYNAMO_BACKEND out, so that nothing is compiled",
        fix="write Accelerator(dynamo_backend=...) in the script, or set ACCELERATE_DYNAMO_BACKEND yourself",
        see=f"{_SOURCE}/utils/launch.py",
        find=_dynamo_is_ignored,
        bad=Example(
            accelerate={
                **_FILE,
                DEEPSPEED_SECTION: {"zero_stage": 2},
                "dynamo_config": {"dynamo_backend": "EAGER"},
            }
        ),
        good=Example(accelerate={**_FILE, DEEPSPEED_SECTION: {"zero_stage": 2}}),
        evidence=Evidence(outcome=Effect.IGNORED, not_reproduced="the ranks' environment is not observed"),
    ),
    Rule(
        id="accumulation-not-in-deepspeed-file",
        severity=Severity.ERROR,
        summary="DeepSpeed does not accumulate what Accelerator() asks for",
        why="a file without gradient_accumulation_steps means 1, and accelerate takes the file's value",
        fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file',
        see=_DATACLASSES,
        find=_steps_missing,
        bad=Example(deepspeed=_TWO_SAMPLES, script=_FOUR),
        good=Example(deepspeed={**_TWO_SAMPLES, _STEPS: "auto"}, script=_FOUR),
        evidence=Evidence(outcome=Effect.IGNORED, observed=((_STEPS, 1),)),
    ),
    Rule(
        id="accumulation-differs",
        severity=Severity.WARNING,
        summary="Accelerator() and the DeepSpeed file accumulate different numbers of steps",
        why="accelerate takes the DeepSpeed file's number and says so in one line of its log",
        fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file, or the same number in both',
        see=_ACCELERATOR,
        find=_steps_differ,
        bad=Example(deepspeed={**_TWO_SAMPLES, _STEPS: 8}, script=_FOUR),
        good=Example(deepspeed={**_TWO_SAMPLES, _STEPS: 4}, script=_FOUR),
        evidence=Evidence(outcome=Effect.IGNORED, observed=((_STEPS, 8),)),
    ),
)
