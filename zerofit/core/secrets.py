"""Secrets on a command line: recognized by flag name or format, and masked."""

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
_VALUE = re.compile(
    r"(?<![\w-])((hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abprs]-)[\w-]{16,}|(AKIA|ASIA)[A-Z0-9]{16}(?!\w))"
    r"|(?<=://)[^\s/:@]*:[^\s/]+(?=@)"
)
"""Tokens of Hugging Face, OpenAI, GitHub, GitLab, Slack, AWS by prefix; a URL's user and password."""
_NAMED = re.compile(
    r"(?i)((?:[\w-]*(?:password|passwd|secret|api[-_.]?key|access[-_.]?key|_token|-token)"
    r"|authorization: bearer|\btoken)[\"']?(?:\s*[=:]\s*|\s+)[\"']?)(?=[\w./+~-]*\d)[\w./+~-]{12,}"
)
"""A secret after its name in a line of text: 12 or more characters with at least one digit."""


def is_secret_name(name: str) -> bool:
    """Return True if a flag or key of this name holds a secret."""
    return _NAME.search(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Return True if a variable is a secret by its name, or has one in its value."""
    return is_secret_name(name) or _VALUE.search(value) is not None


def masked(words: Sequence[str]) -> tuple[str, ...]:
    """Return command-line words with the values of secrets masked."""
    return tuple(word if name is None else f"{before}{MASK}" for word, before, name in _words(words))


def shell_words(words: Sequence[str]) -> str:
    """Return words quoted for a shell, each secret replaced by a variable that must be set."""
    return " ".join(
        shlex.quote(word) if name is None else f'{shlex.quote(before) if before else ""}"${{{name}:?}}"'
        for word, before, name in _words(words)
    )


def secret_variables(words: Sequence[str]) -> tuple[str, ...]:
    """Return the variables that stand for secrets in shell_words, without duplicates."""
    return tuple(dict.fromkeys(name for _, _, name in _words(words) if name is not None))


def _words(words: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield each word, its part before a secret, and the name of the variable for the secret."""
    last = ""
    for word in words:
        flag, joint, value = word.partition("=")
        is_value_of_last = last.startswith("-") and "=" not in last and not word.startswith("--")
        if joint and (is_secret_name(flag) or _VALUE.search(value)):
            yield word, f"{flag}=", _variable(flag)
        elif is_value_of_last and is_secret_name(last):
            yield word, "", _variable(last)
        elif _VALUE.search(word):
            yield word, "", _variable(last if is_value_of_last else "secret")
        else:
            yield word, "", None
        last = word


def _variable(flag: str) -> str:
    return re.sub(r"\W+", "_", flag.strip("-")).upper()


def masked_text(text: str) -> str:
    """Return a line of text with secrets masked that are recognized by format or by the name before them."""
    return _NAMED.sub(rf"\g<1>{MASK}", _VALUE.sub(MASK, text))
