"""The page of versions that were tested."""

from __future__ import annotations

from tools.measured_pages import versions_page

_VERSIONS = {"python": "3.11.7", "torch": "2.8.0", "accelerate": "1.10.0", "deepspeed": "0.18.3"}
_VERSIONS |= {"transformers": "5.0.0", "huggingface_hub": "1.3.0", "peft": None, "bitsandbytes": "0.46.1"}


def _kept(*checks: tuple[str, bool]) -> dict[str, object]:
    rows = [{"check": name, "passed": passed, "seconds": 7} for name, passed in checks]
    return {"measured_on": "2026-01-02", "versions": _VERSIONS, "checks": rows}


def test_a_check_that_failed_or_was_not_run_is_not_passed() -> None:
    page = versions_page(
        {
            "oldest": _kept(("example[Trainer-ZeRO-3]", True), ("plan of a script", False)),
            "newest": _kept(("example[Trainer-ZeRO-3]", True)),
        }
    )
    assert page.splitlines()[-5:] == [
        "| peft | none | none |",
        "| bitsandbytes | 0.46.1 | 0.46.1 |",
        "| example: Trainer, ZeRO-3 | passed, 7 s | passed, 7 s |",
        "| plan of a script | **failed** | not run |",
        "| measured on | 2026-01-02 | 2026-01-02 |",
    ]


def test_the_ranges_are_those_that_are_refused_by() -> None:
    assert "| transformers | `>=5.0,<6` | 5.23.0 |\n" in versions_page({})
