"""Secrets among the words of a command line."""

from __future__ import annotations

import subprocess

import pytest

from zerofit.core.secrets import is_secret, masked, masked_text, secret_variables, shell_words

_KEPT = (
    ("train.py", "--eos_token", "<|im_end|>", "--text-key", "text"),
    ("train.py", "--tokenizer", "gpt2", "--secret"),
    ("train.py", "--task", "task-classification-of-long-texts", "--url", "http://host:80/a@b"),
)
_MASKED = [
    (("train.py", "--api-key=abc", "data"), ("train.py", "--api-key=***", "data")),
    (
        ("train.py", "--password", "abc", "--max_tokens", "5"),
        ("train.py", "--password", "***", "--max_tokens", "5"),
    ),
    (
        ("train.py", "secret=abc", "--use_token", "--lr", "1"),
        ("train.py", "secret=***", "--use_token", "--lr", "1"),
    ),
    (("train.py", f"hf_{'a' * 20}"), ("train.py", "***")),
    (("train.py", "--db", "postgres://u:hunter2@h/db"), ("train.py", "--db", "***")),
    (("train.py", "--x=AKIAIOSFODNN7EXAMPLE"), ("train.py", "--x=***")),
    *((words, words) for words in _KEPT),
]


@pytest.mark.parametrize(("target", "expected"), _MASKED)
def test_only_values_of_secret_arguments_are_masked(
    target: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert masked(target) == expected


def test_in_a_line_for_a_shell_a_secret_is_a_variable_that_must_be_set() -> None:
    words = ("printf", "%s|%s|%s", "--hub_token", "abc", "--wandb-key=d e")
    line = shell_words(words)
    assert line == """printf '%s|%s|%s' --hub_token "${HUB_TOKEN:?}" --wandb-key="${WANDB_KEY:?}\""""
    assert secret_variables(words) == ("HUB_TOKEN", "WANDB_KEY")
    values = {"HUB_TOKEN": "abc", "WANDB_KEY": "d e"}
    ran = subprocess.run(["sh", "-c", line], env=values, capture_output=True, text=True, check=True)
    assert ran.stdout == "--hub_token|abc|--wandb-key=d e"
    unset = subprocess.run(["sh", "-c", line], env={}, capture_output=True, text=True, check=False)
    assert unset.returncode != 0
    assert "HUB_TOKEN" in unset.stderr


def test_a_password_in_a_url_is_masked_alone() -> None:
    line = "failed: https://user:hunter@22@huggingface.co/x, key AKIAIOSFODNN7EXAMPLE"
    assert masked_text(line) == "failed: https://***@huggingface.co/x, key ***"


def test_a_variable_is_a_secret_by_its_name_or_its_value() -> None:
    assert is_secret("HF_TOKEN", "a")
    assert is_secret("DATABASE_URL", "postgres://u:p@h/db")
    assert not is_secret("HTTPS_PROXY", "http://proxy:3128")
