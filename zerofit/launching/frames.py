"""The frames of a traceback in a log: which file raised the exception, and of which package it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_FRAME = re.compile(
    r'\s+File "(?P<path>[^"]+)", line (?P<line>\d{1,9})(?:, in (?P<function>\S+))?'  # Python
    r"|\s*│ (?P<path2>\S+\.py):(?P<line2>\d{1,9}) in (?P<function2>\w+|<\w+>)"  # rich
    r"|\s*File (?P<path3>[^\s:]+):(?P<line3>\d{1,9})(?:,| in (?P<function3>\w+))"  # IPython
    # IPython before 8, in Colab with a link
    r"|\[?(?P<path4><ipython[^>]{0,100}>|[^\s\]]{1,400}\.py)\]?(?:\(\S{0,400}\))? in (?P<function4>\w+|<\w+>)"
)
_INSTALLED = re.compile(r"(?:site|dist)-packages/(?=\w)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[\d.]*/|(?i:/python3?\d*/lib/)|^<(?!ipython|stdin)")
_CHECKED_OUT = frozenset(
    {
        "accelerate",
        "apex",
        "axolotl",
        "bitsandbytes",
        "datasets",
        "deepspeed",
        "diffusers",
        "fairscale",
        "llamafactory",
        "megatron",
        "openrlhf",
        "peft",
        "swift",
        "torch",
        "transformers",
        "trl",
        "verl",
    }
)
"""Libraries that people run from a checkout: transformers/src/transformers, Megatron-LM/megatron."""
_DATA = ("datasets/", "pandas/", "pyarrow/", "PIL/", "webdataset/", "torchaudio/", "soundfile", "librosa/")
"""Packages whose exceptions are mostly about the data that they read."""
_DATA_PARTS = re.compile(r"data_collator|dataset|tokeniz|/data/|data_utils")
_DATA_WORDS = re.compile(
    r"(?i)data|batch|example|sample|(?<!th)row|record|item|column|feature|collat|token|label|input_ids|preproc|annot"
    r"|(?<![a-z])(?:df|ds|ex|img|image|images|text|texts|prompt|messages)(?![a-z])"
)
"""What functions and variables are called that handle data. ASSUMPTION."""
_CHECKPOINT_WORDS = re.compile(r"(?i)(?:checkpoint|ckpt|state_?dict)\w{0,64}\[|load_state_dict")
_OPTIMIZER = re.compile(
    r"/optim(?:izers?)?/|(?:^|[/_])(?:optim|optimizer|optimization|adamw?|cpu_adam|lion|adafactor)\.py$"
)
_OF_SAMPLES = ("__getitem__", "__getitems__", "__iter__")
"""Methods of a data set that make a sample."""
_LACKED = re.compile(r"object has no attribute '(\w{1,100})'")
PYTHON = "Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a traceback."""

    path: str
    line: int | None
    """None if unknown."""
    function: str = ""
    code: str = ""
    """The line of source that it shows."""

    @property
    def place(self) -> str:
        """Return the frame as file:line."""
        return self.path if self.line is None else f"{self.path}:{self.line}"

    @property
    def module(self) -> str | None:
        """Return its path within a library, such as deepspeed/runtime/engine.py; None for the user's own."""
        path = self._path
        if found := list(_INSTALLED.finditer(path)):
            return path[found[-1].end() :]
        if found := list(_STANDARD.finditer(path)):
            return f"{PYTHON}/{path[found[-1].end() :]}"
        parts = path.split("/")
        for at in range(len(parts) - 1, 0, -1):
            above = parts[at - 1].lower()
            if parts[at] in _CHECKED_OUT and (above == "src" or above.startswith(parts[at])):
                return "/".join(parts[at:])
        return None

    @property
    def package(self) -> str | None:
        """Return the library's name; None for the user's own code."""
        return None if self.module is None else re.split(r"[/.]", self.module)[0]

    @property
    def reads_data(self) -> bool:
        """Return True if the code of a library mostly fails for the data that it is given."""
        module = self.module or ""
        return module.startswith(_DATA) or _DATA_PARTS.search(module) is not None

    def is_at(self, place: str, raised: str) -> bool:
        """Return True if the frame is at a place: part of its file and function in a library, or a subject.

        Args:
            place: such as deepspeed/ops/, or "stage3.py in initialize_optimizer_states"; "script" is the
                user's own code, "data", "checkpoint" and "optimizer" are code that handles these, "sample" a
                data set of the user's own, "self" a method of the user's own that reads its own attribute.
            raised: the exception's message.
        """
        if place == "script":
            return self.module is None
        if place == "sample":
            return self.module is None and self.function in _OF_SAMPLES
        if place == "self":
            lacked = _LACKED.search(raised)
            return self.module is None and bool(lacked and re.search(rf"\bself\.{lacked[1]}\b", self.code))
        if place == "data":
            return self.reads_data or (self.module is None and _DATA_WORDS.search(self._said) is not None)
        if place == "checkpoint":
            return self.module is None and _CHECKPOINT_WORDS.search(self._said) is not None
        if place == "optimizer":
            return _OPTIMIZER.search(self._path) is not None
        return place in f"{self.module} in {self.function}"

    @property
    def _path(self) -> str:
        return self.path.replace("\\", "/")

    @property
    def _said(self) -> str:
        """Return file, function and source, which tell what the code is about."""
        return f"{self._path.rpartition('/')[2]} {self.function} {self.code}"


def frame_in(text: str) -> Frame | None:
    """Return the frame that a line of a traceback shows; None if it shows none."""
    found = _FRAME.match(text)
    if found is None:
        return None
    parts = {name.rstrip("234"): value for name, value in found.groupdict().items() if value is not None}
    line = parts.get("line")
    return Frame(
        path=parts["path"], line=None if line is None else int(line), function=parts.get("function", "")
    )


def script_of(frames: Sequence[Frame]) -> str | None:
    """Return the user's script that a traceback begins in."""
    first = next((frame for frame in frames if frame.module is None), None)
    is_script = first is not None and first.function == "<module>" and first.path.endswith(".py")
    return first.path if first is not None and is_script else None
