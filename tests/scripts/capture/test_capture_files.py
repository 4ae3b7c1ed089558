"""Which folders are the user's, and which are caches that stay as a script leaves them."""

from __future__ import annotations

from pathlib import Path

from zerofit.scripts.capture.restore_files import argument_paths, places


def _places(*target: str, cwd: str = "/home/u/project", **environment: str) -> dict[str, list[str]]:
    return places(target, environment=environment, cwd=Path(cwd), home=Path("/home/u"))


def test_the_script_and_what_its_arguments_name_is_the_users() -> None:
    assert _places("src/train.py", "--data", "texts", "--out=/data/out", "--lr", "1e-3")["roots"] == [
        "/home/u/project",
        "/home/u/project/src",
        "/home/u/project/texts",
        "/data/out",
        "/home/u/project/1e-3",
    ]


def test_a_module_has_no_folder_of_its_own() -> None:
    assert _places("-m", "package.train", "texts")["roots"] == ["/home/u/project", "/home/u/project/texts"]


def test_caches_are_those_of_the_environment_of_home_and_of_flags() -> None:
    found = _places("train.py", "--cache_dir", "c", "--data_cache=/d", HF_HOME="/hf", HF_HUB_CACHE="relative")
    below = [path for path in found["caches"] if path.startswith("/home/u/.cache/")]
    assert {"/home/u/.cache/huggingface", "/home/u/.cache/torch", "/home/u/.cache/clip"} <= {*below}
    assert [path for path in found["caches"] if path not in below] == [
        "/hf",
        "/home/u/project/c",
        "/d",
        "/home/u/.triton",
        "/home/u/.nv",
        "/home/u/.config/matplotlib",
        "/home/u/nltk_data",
        "/tmp/data-gym-cache",
        "/tmp/ray",
        "/tmp/tfhub_modules",
    ]


def test_a_folder_that_the_script_runs_in_is_no_cache() -> None:
    named = _places("train.py", cwd="/home/u/.cache/torch", XDG_CACHE_HOME="relative")
    assert "/home/u/.cache/torch" not in named["caches"]


def test_folders_that_hold_the_working_folder_are_not_arguments(tmp_path: Path) -> None:
    target = ("train.py", "..", ".", "/", str(tmp_path), "a", "a", "x" * 5000, "nul\0", "")
    assert argument_paths(target, tmp_path) == [tmp_path / "a"]
