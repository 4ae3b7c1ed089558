"""Secrets among the words of a command line."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from zerofit.core.secrets import (
    is_secret,
    masked,
    masked_text,
    masked_values,
    secret_variables,
    shell_words,
)

_PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "secrets.md").read_text(encoding="utf-8")
_TABLE = re.compile(r"^\| (?P<head>arguments|text) \| [a-z ]+ \|\n\|-.*\n(?P<rows>(?:\|.*\n)+)", re.M)


def _rows(head: str) -> list[tuple[str, str]]:
    """Return the rows of the page's tables of arguments, or of text."""
    lines = [
        line
        for table in _TABLE.finditer(_PAGE)
        if table["head"] == head
        for line in table["rows"].splitlines()
    ]
    cells = [
        [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines
    ]
    return [
        (said.strip("`"), said.strip("`") if shown == "the same" else shown.strip("`"))
        for said, shown in cells
    ]


@pytest.mark.parametrize(("line", "kept"), _rows("arguments"))
def test_arguments_are_kept_as_the_page_says(line: str, kept: str) -> None:
    words = tuple(line.split(" ") if "={'" in line else shlex.split(line))
    assert masked(("train.py", *words)) == ("train.py", *shlex.split(kept))
    assert (secret_variables(words) == ()) is (line == kept)


@pytest.mark.parametrize(("text", "shown"), _rows("text"))
def test_text_is_shown_as_the_page_says(text: str, shown: str) -> None:
    assert masked_text(text) == shown


def test_the_page_has_its_tables() -> None:
    assert len(_rows("arguments")) >= 45
    assert len(_rows("text")) >= 10


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--x", '{"a": {"db_password": "q=w"}}'), ("--x", "***")),
        (("--uri", "mongodb+srv://me:s3cr3t@c.mongodb.net/db"), ("--uri", "***")),
        (("--uri", "redis://:pw@h:6379/0"), ("--uri", "***")),
        (("--opt", "key=1,token=ab12cd34"), ("--opt", "***")),
        (("-e", "HF_TOKEN=abc"), ("-e", "HF_TOKEN=***")),
        (("--proxy", "http://u:p@proxy:3128"), ("--proxy", "***")),
        (("--conn", "Server=h;User Id=u;Pwd=p;"), ("--conn", "***")),
        (("--k", "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----"), ("--k", "***")),
        (("--llm.apiKey", "abc"), ("--llm.apiKey", "***")),
        (("--sshKey=abc",), ("--sshKey=***",)),
        (("--opt", "{'passwords': ['q=w', 'b2']}"), ("--opt", "***")),
        (("--smtp_pass", "abc"), ("--smtp_pass", "***")),
        (("--key", f"wandb_v1_{'ab12' * 8}"), ("--key", "***")),
    ],
)
def test_other_values_of_these_kinds_are_masked(words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    found = masked(words)
    assert [word.partition("***")[1] for word in found] == [word.partition("***")[1] for word in expected]
    assert not any(secret in " ".join(found) for secret in ("q=w", "s3cr3t", ":pw@", "ab12cd34", "MIIB"))


def test_two_secrets_have_two_variables_and_the_same_secret_has_its_own() -> None:
    words = (
        "-H",
        "Authorization: Bearer a",
        "-H",
        "X-Api-Key: b",
        "--token=c",
        "--token=c",
        "--2fa-token",
        "d",
    )
    assert secret_variables(words) == ("H", "H_2", "TOKEN", "SECRET_2FA_TOKEN")


def test_secrets_of_a_document_are_masked_by_their_keys_and_forms() -> None:
    document = {"db": {"password": "x", "host": "h"}, "urls": ["https://u:p@h/", 3], "n_tokens": "5"}
    assert masked_values(document) == {
        "db": {"password": "***", "host": "h"},
        "urls": ["https://***@h/", 3],
        "n_tokens": "5",
    }


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"client_secret":"x\\"y z"}', '{"client_secret":"***"}'),
        ('"{\\"api_key\\": \\"abc\\", \\"x\\": 1}"', '"{\\"api_key\\": \\"***\\", \\"x\\": 1}"'),
        ("['--api-key', 'abc', '--lr', '1']", "['--api-key', '***', '--lr', '1']"),
        ("['password', 'user'] not in index", "['password', 'user'] not in index"),
        ("'--eos_token', '</s>'", "'--eos_token', '</s>'"),
        ("password%3A%20hunter2", "password%3A***"),
        ("https://hf_abcdefghijklmnop1234:x@h/", "https://***@h/"),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nVersion: 1\n\nlQ\n-----END PGP PRIVATE KEY BLOCK-----",
            "***",
        ),
        (
            "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4\nDEK-Info: A\n\nMI\n-----END RSA PRIVATE KEY-----",
            "***",
        ),
    ],
)
def test_quoted_listed_and_encoded_secrets_are_masked_to_their_ends(text: str, expected: str) -> None:
    assert masked_text(text) == expected


def test_a_variable_is_a_secret_by_its_name_or_its_value() -> None:
    assert is_secret("HF_TOKEN", "a")
    assert is_secret("DATABASE_URL", "postgres://u:p@h/db")
    assert not is_secret("HTTPS_PROXY", "http://proxy:3128")
