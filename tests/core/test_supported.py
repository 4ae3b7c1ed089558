"""The supported ranges: one with pyproject.toml and the tested versions, and what is refused by name."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from zerofit.core.facts import Versions
from zerofit.core.strategy import Lora, OptimizerName, Quantization, Strategy
from zerofit.core.supported import (
    ALWAYS_USED,
    PYTHON,
    SUPPORTED,
    SupportedRange,
    packages_of,
    release_of,
    unsupported,
    untested,
)

_ROOT = Path(__file__).parents[2]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_REQUIREMENTS = {one.name: one for one in map(Requirement, _PROJECT["dependencies"])}
_NEWEST = Versions(
    python="3.11.7",
    zerofit="0.1.0",
    torch="2.13.0+cpu",
    accelerate="1.15.0",
    deepspeed="0.19.8",
    transformers="5.23.0",
    huggingface_hub="2.4.0",
)


def _pins(file: str) -> dict[str, str]:
    lines = (_ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_pyproject_asks_for_the_supported_ranges() -> None:
    asked = {name: _REQUIREMENTS[name].specifier for name in SUPPORTED}
    assert asked == {name: SpecifierSet(supported.specifier) for name, supported in SUPPORTED.items()}
    assert _PROJECT["requires-python"] == PYTHON.specifier
    python = "Programming Language :: Python :: 3."
    minors = [int(line.removeprefix(python)) for line in _PROJECT["classifiers"] if line.startswith(python)]
    assert minors == list(range(release_of(PYTHON.at_least)[1], release_of(PYTHON.tested)[1] + 1))


def test_the_newest_tested_releases_are_the_pinned_ones() -> None:
    pins = _pins("constraints.txt")
    assert {name: supported.tested for name, supported in SUPPORTED.items()} == {
        name: pins[name] for name in SUPPORTED
    }


def test_the_oldest_set_has_the_floor_of_every_dependency() -> None:
    pins = _pins("versions/oldest.txt")
    floors = {
        name: specifier.version
        for name, requirement in _REQUIREMENTS.items()
        for specifier in requirement.specifier
        if specifier.operator == ">="
    }
    assert {name: release_of(pins[name]) for name in floors} == {
        name: release_of(floor) for name, floor in floors.items()
    }


@pytest.mark.parametrize("file", sorted(path.name for path in (_ROOT / "versions").glob("*.txt")))
def test_a_set_holds_supported_releases_only(file: str) -> None:
    pins = _pins(f"versions/{file}")
    assert [name for name, one in _REQUIREMENTS.items() if not one.specifier.contains(pins[name])] == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("2.13.0+cpu", (2, 13)),
        ("5.0.0", (5,)),
        ("0.19.8", (0, 19, 8)),
        ("5.24.0.dev0", (5, 24)),
        ("2.9.0rc1", (2, 9)),
        ("?", ()),
    ],
)
def test_a_release_is_the_numbers_of_a_version(version: str, expected: tuple[int, ...]) -> None:
    assert release_of(version) == expected


@pytest.mark.parametrize(
    ("version", "has", "is_untested"),
    [
        ("0.9", False, False),
        ("1.0", True, False),
        ("1.4.0", True, False),
        ("1.4.1", True, True),
        ("1.10", True, True),
        ("2.0.0", False, False),
    ],
)
def test_a_range_begins_at_its_floor_and_ends_before_its_cap(
    version: str, has: bool, is_untested: bool
) -> None:
    one = SupportedRange(package="lib", at_least="1.0", below="2", tested="1.4.0")
    assert (one.has(version), one.is_untested(version)) == (has, is_untested)


def test_what_is_out_of_range_or_missing_is_named_with_its_range_and_the_command_that_mends_it() -> None:
    versions = Versions(
        python="3.11.7",
        zerofit="0.1.0",
        torch="2.5.1+cu121",
        accelerate="1.15.0",
        transformers="4.57.6",
        huggingface_hub="1.3.0",
    )
    assert str(unsupported(versions, ALWAYS_USED)) == (
        "error[version-unsupported]: a library is missing, or has an unsupported version\n"
        "  found: torch 2.5.1+cu121, no deepspeed, transformers 4.57.6\n"
        "  why:   zerofit supports torch>=2.8, deepspeed>=0.18.3,<0.20, transformers>=5.0,<6\n"
        "  fix:   pip install 'torch>=2.8' 'deepspeed>=0.18.3,<0.20' 'transformers>=5.0,<6'"
    )


def test_supported_releases_are_not_refused_and_those_tested_are_not_told() -> None:
    assert unsupported(_NEWEST, ALWAYS_USED) is None
    assert untested(_NEWEST) == ()


def test_a_newer_release_than_all_that_were_tested_is_told() -> None:
    newer = Versions(python="3.11.7", zerofit="0.1.0", transformers="5.24.0")
    assert untested(newer) == (
        "transformers 5.24.0 is newer than 5.23.0, the newest that zerofit was tested with",
    )


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy(), ()),
        (Strategy(optimizer=OptimizerName.ADAMW), ()),
        (Strategy(optimizer=OptimizerName.SGD), ()),
        (Strategy(optimizer=OptimizerName.ADAFACTOR), ()),
        (Strategy(optimizer=OptimizerName.LION), ("bitsandbytes",)),
        (Strategy(optimizer=OptimizerName.PAGED_ADAMW), ("bitsandbytes",)),
        (Strategy(lora=Lora()), ("peft",)),
        (Strategy(lora=Lora(), quantization=Quantization.NF4), ("peft", "bitsandbytes")),
    ],
)
def test_a_strategy_needs_the_packages_that_it_is_made_of(
    strategy: Strategy, expected: tuple[str, ...]
) -> None:
    assert packages_of(strategy) == expected


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("3.12.9", ()),
        ("3.14.0", ("Python 3.14 is newer than 3.13, the newest that zerofit was tested with",)),
    ],
)
def test_a_newer_python_is_said_but_no_patch_release_of_a_tested_one(
    python: str, said: tuple[str, ...]
) -> None:
    assert untested(replace(_NEWEST, python=python)) == said
