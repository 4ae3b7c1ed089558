"""What makes a cached capture another one, and who can read it."""

from __future__ import annotations

import os
import time

import pytest

from zerofit.scripts.capture import cache


def _captures_anew(workplace, *arguments: str) -> bool:
    before = workplace.runs()
    time.sleep(0.02)  # what changes in the very moment of a capture is not kept
    workplace.capture(*arguments).close()
    return workplace.runs() > before


_LINKS = {
    "an argument": ("import training\ntraining.begin()", ("--data", "current")),
    "a file that it reads": ("import training\nopen('current/a.txt').read()\ntraining.begin()", ()),
    "a folder that its code names": ("import training\n'current'\ntraining.begin()", ()),
}


@pytest.mark.parametrize(
    "what",
    [
        "an argument",
        *(pytest.param(what, marks=pytest.mark.slow) for what in _LINKS if what != "an argument"),
    ],
)
def test_a_link_that_leads_elsewhere_makes_a_capture_anew(workplace, what: str) -> None:
    text, arguments = _LINKS[what]
    workplace.write_counted(text)
    for folder in ("one", "two"):
        workplace.write(folder, name=f"{folder}/a.txt")
    (workplace.cwd / "current").symlink_to("one")
    assert _captures_anew(workplace, *arguments)
    assert not _captures_anew(workplace, *arguments)
    (workplace.cwd / "current").unlink()
    (workplace.cwd / "current").symlink_to("two")
    assert _captures_anew(workplace, *arguments)


def test_a_script_that_saw_the_gpu_that_stands_in_is_kept_for_runs_without_planned_gpus(workplace) -> None:
    shown = cache.gpu_words((cache.STAND_IN_GPU,))
    workplace.write_counted(f"import training\ntraining.begin(told_gpus={shown!r})")
    assert _captures_anew(workplace)
    assert not _captures_anew(workplace)


def test_a_capture_that_reads_more_files_than_are_noted_is_not_kept(workplace, monkeypatch) -> None:
    monkeypatch.setattr("zerofit.scripts.capture.cache.MAX_FILES_READ", 2)
    workplace.write_counted("import training\nfor n in range(3): open(f'{n}.txt').read()\ntraining.begin()")
    for number in range(3):
        workplace.write("x", name=f"{number}.txt")
    time.sleep(0.02)
    assert _captures_anew(workplace)
    assert _captures_anew(workplace)


def test_the_revision_and_configuration_in_a_hubs_cache_count(workplace) -> None:
    hub = workplace.cache.parent / "hub" / "models--a"
    workplace.write_counted(
        f"""
        import training
        revision = open("{hub}/refs/main").read()
        open(f"{hub}/snapshots/{{revision}}/config.json").read()
        open(f"{hub}/snapshots/{{revision}}/tokenizer.json").read()
        training.begin()
        """
    )
    for revision in ("1", "2"):
        (hub / "snapshots" / revision).mkdir(parents=True)
        for name in ("config.json", "tokenizer.json"):
            (hub / "snapshots" / revision / name).write_text(revision)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("1")
    assert _captures_anew(workplace)
    assert not _captures_anew(workplace)
    (hub / "snapshots" / "1" / "config.json").write_text("more")
    assert _captures_anew(workplace)
    (hub / "refs" / "main").write_text("2")
    assert _captures_anew(workplace)
    (hub / "snapshots" / "2" / "tokenizer.json").write_text("more")
    assert not _captures_anew(workplace)


def test_what_is_kept_is_its_users_alone_and_holds_no_secrets(workplace) -> None:
    workplace.write("import training\ntraining.begin()\n")
    workplace.capture("--hub_token", "secret-1", "--api-key=secret-2", "--tokenizer", "gpt2").close()
    (file,) = (workplace.cache / "captures").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "secret-" not in file.read_text()
    assert "gpt2" in file.read_text()
    with workplace.capture("--hub_token", "secret-1", "--api-key=secret-2", "--tokenizer", "gpt2") as script:
        assert script.capture.target[1:] == ("--hub_token", "***", "--api-key=***", "--tokenizer", "gpt2")
        assert os.listdir(workplace.cache / "capturing") == []


def test_each_file_of_zerofit_that_decides_a_capture_or_a_trace_is_there() -> None:
    for pattern in (*cache._CAPTURING, *cache._TRACING):
        assert list(cache._ZEROFIT.glob(pattern)), pattern
