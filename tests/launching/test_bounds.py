"""Numbers, files and programs without end: refused before anything is started."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import NO_GPU, PLAN
from zerofit_in_process import run_in_process

from zerofit.checking.read_targets import probe_resumed
from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec
from zerofit.core.plan import Topology, plan_to_json
from zerofit.launching.checks import check_num_ranks
from zerofit.launching.generate import prompts
from zerofit.launching.generate.prompts import PromptLine, tokenized

_GPU = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 << 30)


@pytest.mark.parametrize(
    ("num_ranks", "on_cpu", "num_gpus", "is_refused"),
    [
        (64, True, 0, False),
        (65, True, 0, True),
        (100_000, True, 8, True),
        (8, False, 8, False),
        (9, False, 8, True),
        (100_000, False, 8, True),
        (1, False, 1, False),
    ],
)
def test_a_node_starts_no_more_ranks_than_it_can_hold(
    num_ranks: int, on_cpu: bool, num_gpus: int, is_refused: bool
) -> None:
    plan = replace(PLAN, topology=Topology(world_size=num_ranks, on_cpu=on_cpu))
    node = replace(NO_GPU, gpus=(_GPU,) * num_gpus)
    if not is_refused:
        check_num_ranks(plan, node)
        return
    with pytest.raises(UserError) as raised:
        check_num_ranks(plan, node)
    assert raised.value.rule == "too-many-ranks"
    assert "--no-check" in raised.value.fix
    check_num_ranks(replace(plan, is_checked=False), node)


def test_a_plan_of_too_many_ranks_starts_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    plan = replace(PLAN, topology=Topology(world_size=100_000, on_cpu=True))
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    done = run_in_process(("launch", "--cpu", "--plan", "plan.json", "train.py"), cwd=tmp_path)
    assert (done.returncode, "error[too-many-ranks]" in done.stderr) == (2, True)
    assert not (tmp_path / "zerofit-runs").exists()


_ENDLESS: dict[str, Callable[[Path], object]] = {
    "zeros": lambda file: file.symlink_to("/dev/zero"),
    "random": lambda file: file.symlink_to("/dev/urandom"),
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "itself": lambda file: file.symlink_to(file),
}


@pytest.mark.parametrize("kind", _ENDLESS)
@pytest.mark.parametrize(
    "words",
    [
        ("launch", "--plan", "FILE", "train.py"),
        ("launch", "--hostfile", "FILE", "--cpu", "--no-capture", "train.py"),
        ("plan", "--plan", "FILE"),
        ("check", "FILE"),
        ("plan", "--gpus", "1xA100-40G", "accelerate", "launch", "--config_file", "FILE", "train.py"),
        ("submit", "--on", "slurm", "--plan", "FILE", "--dry-run", "train.py"),
        ("generate", "--cpu", "--model", ".", "--prompts", "FILE"),
    ],
)
def test_a_file_without_end_is_refused(tmp_path: Path, kind: str, words: tuple[str, ...]) -> None:
    (tmp_path / "train.py").touch()
    _ENDLESS[kind](tmp_path / "file.json")
    began = time.monotonic()
    done = run_in_process([word.replace("FILE", "file.json") for word in words], cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("kind", _ENDLESS)
def test_a_checkpoint_names_its_folder_in_a_file_with_an_end(tmp_path: Path, kind: str) -> None:
    _ENDLESS[kind](tmp_path / "latest")
    assert probe_resumed(("--resume_from_checkpoint", str(tmp_path))) is None


class _Templated:
    """A tokenizer with a chat template, rendered as transformers renders it."""

    def __init__(self, template: str) -> None:
        self.template = template

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        return ImmutableSandboxedEnvironment().from_string(self.template).render(messages=messages)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


_LOOP = "{% for a in range(99999) %}"
_ENDLESS_TEMPLATES = {
    "loops": _LOOP * 3 + "{% endfor %}" * 3,
    "text": _LOOP * 3 + "x" + "{% endfor %}" * 3,
    "a macro": "{% macro m() %}" + _LOOP * 2 + "{% endfor %}" * 2 + "{{ m() }}{% endmacro %}{{ m() }}",
    "a long text": "{{ 'x' * 100000000000 }}",
    "a long list": "{{ ([0] * 100000000000) | length }}",
    "a power": "{{ (10 ** 10 ** 7) % 7 }}{{ (3 ** 10 ** 7) | string | length }}"
    + _LOOP * 3
    + "{% endfor %}" * 3,
}


@pytest.mark.parametrize("kind", _ENDLESS_TEMPLATES)
def test_a_chat_template_without_end_is_ended(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "TEMPLATE_LIMIT_S", 1.0)
    lines = [PromptLine(prompt=[{"role": "user", "content": "hi"}], fields={})]
    began = time.monotonic()
    with pytest.raises(UserError) as raised:
        tokenized(lines, _Templated(_ENDLESS_TEMPLATES[kind]), as_chat=True)
    assert raised.value.rule == "chat-refused"
    assert time.monotonic() - began < 60


def test_a_chat_template_with_an_end_is_rendered() -> None:
    lines = [PromptLine(prompt=[{"role": "user", "content": "hi"}], fields={})] * 2
    tokenizer = _Templated("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert tokenized(lines, tokenizer, as_chat=True) == ((104, 105), (104, 105))
    assert json.dumps(vars(tokenizer)) == json.dumps({"template": tokenizer.template})
