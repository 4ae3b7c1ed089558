"""Secrets among the words of a command line: known by their flag or their form, and masked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence

MASK = "***"
_NAME = re.compile(
    r"(?i)(password|passwd|secret"
    r"|(?<!eos.)(?<!bos.)(?<!pad.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)(?<!image.)(?<!stop.)(?<!start.)token"
    r"|(api|access|private|auth|account|wandb|comet|neptune|hub|hf|openai|license)[-_.]?key)(?![a-z])"
)
"""Names of secrets: "hub_token", but not "tokenizer", "eos_token" or "text_key"."""
_VALUE = re.compile(r"(hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}")
"""Prefixes that the tokens of Hugging Face, OpenAI, GitHub, GitLab and Slack begin with."""
_NAMED = re.compile(
    r"(?i)((?:[\w-]*(?:password|passwd|secret|api[-_.]?key|access[-_.]?key|_token|-token)"
    r"|authorization: bearer|\btoken)[\"']?(?:\s*[=:]\s*|\s+)[\"']?)(?=[\w./+~-]*\d)[\w./+~-]{12,}"
)
"""A secret behind its name, in a line of text: of 12 characters and more, a digit among them."""


def is_secret_name(name: str) -> bool:
    """Return True if a flag or key of this name holds a secret."""
    return _NAME.search(name) is not None


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a command line without the values of secrets."""
    return tuple(word if name is None else f"{before}{MASK}" for word, before, name in _words(words))


def shell_words(words: Sequence[str]) -> str:
    """Return words for a shell: each secret is a variable, without which the shell ends with an error."""
    return " ".join(
        shlex.quote(word) if name is None else f'{shlex.quote(before) if before else ""}"${{{name}:?}}"'
        for word, before, name in _words(words)
    )


def secret_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that stand for secrets in shell_words, each once."""
    return tuple(dict.fromkeys(name for _, _, name in _words(words) if name is not None))


def _words(words: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each word, the part of it before a secret, and the name of the variable that stands for that."""
    last = ""
    for word in words:
        flag, joint, value = word.partition("=")
        is_value_of_last = last.startswith("-") and "=" not in last and not word.startswith("--")
        if joint and (is_secret_name(flag) or _VALUE.fullmatch(value)):
            yield word, f"{flag}=", _variable(flag)
        elif is_value_of_last and is_secret_name(last):
            yield word, "", _variable(last)
        elif _VALUE.fullmatch(word):
            yield word, "", _variable(last if is_value_of_last else "secret")
        else:
            yield word, "", None
        last = word


def _variable(flag: str) -> str:
    return re.sub(r"\W+", "_", flag.strip("-")).upper()


def masked_text(text: str) -> str:
    """Return a line of text without the secrets that are known by their form or by the name before them."""
    return _NAMED.sub(rf"\g<1>{MASK}", _VALUE.sub(MASK, text))
