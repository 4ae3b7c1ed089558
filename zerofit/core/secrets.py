"""Secrets in command lines, variables and foreign text: recognized by name or form, and masked.

docs/reference/secrets.md lists what is recognized; tests/core/test_secrets.py runs its tables. Each pattern
reads a text once, however hostile it is: runs are possessive or bounded.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

MASK = "***"
_STRONG = (
    r"(?:pass(?:word|wd|phrase|code)s?|(?:db|ssh|smtp|ldap|ftp|user|root|admin|proxy)[-_.]?pass|(?<![a-z])pwd"
    r"|secrets?|(?<![a-z])cred(?:ential)?s?|cookies?|authorization"
    r"|(?:api|access|private|auth|account|shared|signing|encryption|master|client|storage|session|service|ssh"
    r"|deploy|license|subscription|webhook|wandb|comet|neptune|swanlab|clearml|hub|hf|openai|anthropic|gemini)"
    r"[-_. ]?keys?)"
    r"(?![a-z])(?![-_.](?:file|path|dir|folder|env|name|type|length|len|prompt)s?(?![a-z]))"
)
"""Names of secrets: "db.password", "apiKey", but not "password_file" or "text_key"."""
_TOKEN = (
    r"(?<!eos.)(?<!bos.)(?<!pad.)(?<!unk.)(?<!sep.)(?<!cls.)(?<!mask.)(?<!image.)(?<!video.)(?<!audio.)(?<!stop.)"
    r"(?<!start.)(?<!end.)(?<!special.)(?<!per.)(?<!each.)(?<!num.)(?<!max.)(?<!min.)(?<!first.)(?<!last.)(?<!next.)"
    r"token(?![a-z])(?![-_.](?:ids?|index|file|path|dir|env|type|name|count|limit|len|length|budget|size|level)(?![a-z]))"
)
"""Names of tokens of access: "hub_token", but not "tokenizer", "eos_token" or "token_id"."""
_WEAK = r"(?<![a-z])(?:pass|pat|pin|sig|signature|auth)(?![a-z])"
"""Names that mean a secret only with a value that looks like one: --pass 3 is a number of passes."""
_NAME = re.compile(rf"(?i){_STRONG}|{_TOKEN}")
_WEAK_NAME = re.compile(rf"(?i)(?:^-p|{_WEAK})$")
_USER_NAMES = ("-u", "--user", "--proxy-user")
"""Flags whose value is a user, with the password behind a colon: curl(1)."""
_PARTS = re.compile(r"[-_./:]")
"""What joins the parts of a model's or run's name: -p llama-3-8b."""
_MAY_NAME_FILE = re.compile(r"(?i)pwd|cred|cookie")
_FILE = re.compile(r"(?:~|\.{0,2})/|[\w./~-]{0,4096}+(?<=\.json|\.yaml|.\.txt|.\.yml)$")
"""A path: PWD=/home/me, --credentials key.json, --cookies cookies.txt."""
_NO_SECRET = re.compile(r"(?i)(?:none|null|true|false|yes|no|on|off|auto|\*+|\$.*|<.*>|\{\{.*)?$")
"""Values that stand for a secret, or for none, whatever the name."""
_FLAG = re.compile(r"[-+~]{0,2}[\w./@:-]+$")
_DATA_TYPE = re.compile(r"b?(?:float|fp|int|uint)\d+$")
_FLAG_END = re.compile(r"(?:^|\s)--?[\w-]{0,40}$")
"""The part of a flag before a name in it: "--hub-" of --hub-password."""
_LISTED_FLAG = re.compile(r"[\"']--?[\w-]{0,40}$")
"""The same in a printed list of arguments."""
_CHECKED = 256
"""Characters of a value that are looked at to tell what it is."""

_LONGEST = 1 << 14
"""Characters in which the end of a value is looked for."""

_FORM = re.compile(
    r"(?<![\w-])(?:"
    r"(?<=://)[^\s/:@]*+:[^\s/]+(?=@)"
    r"|(?:hf_|api_org_|sk-|[rs]k_(?:live|test)_|gh[opsur]_|github_pat_|gl(?:pat|dt|rt|cbt)-|xox[abeoprs]-|xapp-"
    r"|npm_|pypi-|dckr_pat_|nvapi-|gsk_|r8_|wandb_v\d_|pplx-|tgp_v1_|hvs\.|dop_v1_|ATATT|ya29\.|SG\."
    r"|lin_api_|shpat_)[\w.-]{16,}+"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}(?!\w)|AIza[\w-]{30,}+|\d{8,10}:AA[\w-]{30,}+"
    r"|eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+(?:\.[\w-]*+)?)"
    r"|(?i:(?<!\w)bearer\s{1,8})[\w.~+/=-]{16,}+"
    r"|-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----))*+(?:-----END [A-Z ]{0,30}-----)?"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{16,}+|(?<=/api/webhooks/)\d{8,20}/[\w-]{16,}+"
    r"|(?<=://)[^\s/:@]{12,}+(?=@)"
)
"""The user and password of a URL; tokens of Hugging Face, OpenAI, Stripe, GitHub, GitLab, Slack, npm, PyPI,
Docker, NVIDIA, Groq, Replicate, W&B, Vault, AWS, Google, Telegram and others by their prefix (the services'
own documents); a JWT; a private key; a URL's user that is a token."""
_HAVE_USERS = ("ssh", "sftp", "scp", "hdfs", "abfs", "abfss", "wasb", "wasbs")
"""Schemes of URLs whose user without a password is a user, or a container."""
_NAME_IN_TEXT = re.compile(
    rf"(?i)(?:(?P<strong>{_STRONG})|(?P<token>{_TOKEN})|{_WEAK})"
    r"(?P<quoted>\\?[\"'])?\]?(?P<joint>\s{0,8}(?:=>|:=|[=:,]|%3[ad])\s{0,8}|\s{1,8})(?P<list>\[\s{0,8})?"
    r"(?:[bru]?(?P<quote>\\?[\"']))?"
)
"""A name, what separates it from its value, and the value's quotation mark, which may be escaped."""
_QUOTED = {quote: re.compile(rf"(?:[^{quote}\\]|\\.)*+", re.S) for quote in "\"'"}
"""What a quotation mark ends, but not an escaped one."""
_SCHEME = re.compile(r"(?i)(?:bearer|basic|token|digest|apikey|negotiate|aws4-hmac-sha256)\s{1,8}")
_BARE = re.compile(r"[^\s\"'`,;&|<>(){}\[\]\\]++")
_TO_LINE_END = re.compile(r"[^\"'\n]++")
_TO_SEMICOLON = re.compile(r"[^\"';\n]++")
_IS_IN_FIELDS = re.compile(r";\s?[\w ]{0,40}$")
"""What is before a field of a connection string: "Uid=u;Password=two words;Database=x"."""
_LONG = re.compile(r"(?=[\w./+~-]{0,64}?\d)[\w./+~-]{12}")
"""What a secret behind a bare space looks like: 12 or more characters with a digit."""


def is_secret_name(name: str) -> bool:
    """Return True if a flag or key of this name holds a secret."""
    return _NAME.search(name) is not None


def is_secret(name: str, value: str) -> bool:
    """Return True if a variable is a secret by its name, or has one in its value."""
    return _is_secret_of(name, value) or _has_secret(value)


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
    last, variables = "", dict[str, str]()
    for word in words:
        flag, joint, value = word.partition("=")
        is_flag = bool(joint) and _FLAG.match(flag) is not None
        is_value_of_last = last.startswith("-") and "=" not in last and not word.startswith("--")
        if is_flag and (_is_secret_of(flag, value) or (not is_value_of_last and _has_secret(value))):
            yield word, f"{flag}=", _variable(flag, value, variables)
        elif (
            (is_value_of_last and _is_secret_of(last, word))
            or _has_secret(word)
            or _follows_scheme(last, word)
        ):
            yield word, "", _variable(last if is_value_of_last else "secret", word, variables)
        else:
            yield word, "", None
        last = word


def _follows_scheme(last: str, word: str) -> bool:
    """Return True for the third word of "Authorization: Bearer TOKEN" without quotation marks."""
    return last.lower() == "bearer" and not word.startswith("--") and len(word) > 1


def _variable(flag: str, value: str, variables: dict[str, str]) -> str:
    """Return the variable for a secret, with a number if another secret has its name.

    Args:
        variables: the secret of each variable so far, which gets another.
    """
    name = re.sub(r"[^A-Za-z0-9]+", "_", flag.lstrip("-+~")).strip("_").upper()
    name = name if name and not name[0].isdigit() else f"SECRET_{name}".rstrip("_")
    numbered, number = name, 1
    while variables.setdefault(numbered, value) != value:
        number += 1
        numbered = f"{name}_{number}"
    return numbered


def masked_text(text: str, *, most: int | None = None) -> str:
    """Return a text with secrets masked that are recognized by form or by the name before them.

    Args:
        text: of any length and content.
        most: characters to return; what is far beyond them isn't read.
    """
    read = text if most is None else text[: most + 16 * _CHECKED]
    parts, at = [], 0
    for start, end in _secrets_in(read):
        parts += [read[at:start], MASK]
        at = end
    return "".join((*parts, read[at:]))[:most]


def masked_values(value: object, name: str = "") -> object:
    """Return a JSON value with the secrets in its texts masked, by their keys or forms.

    Args:
        name: the key that it is the value of.
    """
    if isinstance(value, str):
        return MASK if name and _is_secret_of(name, value) else masked_text(value)
    if isinstance(value, Mapping):
        return {key: masked_values(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(masked_values(inner, name) for inner in value)
    return value


def _has_secret(text: str) -> bool:
    return next(_secrets_in(text), None) is not None


def _secrets_in(text: str) -> Iterator[tuple[int, int]]:
    """Yield start and end of each secret in a text, in their order, without overlaps."""
    at = 0
    for start, end in sorted((*_by_form(text), *_by_name(text))):
        if end > at:
            yield max(start, at), end
            at = end


def _by_form(text: str) -> Iterator[tuple[int, int]]:
    for found in _FORM.finditer(text):
        start, end = found.span()
        if text.startswith("://", start - 3) and ":" not in found[0]:
            scheme = text[max(0, start - 16) : start - 3].rpartition(" ")[2].lower()
            is_token = any(map(str.isdigit, found[0])) or len(found[0]) >= 20
            if not is_token or scheme.endswith(_HAVE_USERS):
                continue
        elif found[0][:6].lower() == "bearer":
            start += len(found[0]) - len(found[0][6:].lstrip())
        yield start, end


def _by_name(text: str) -> Iterator[tuple[int, int]]:
    at = 0
    while (found := _NAME_IN_TEXT.search(text, at)) is not None:
        at = found.end() if found["quote"] or not found["joint"].isspace() else found.start("joint")
        start, end = _value_after(text, found)
        if start < end and _is_value(text[start : min(end, start + _CHECKED)], text[end : end + 1], found):
            at = end
            yield start, end
        at = max(at, found.start() + 1)


def _value_after(text: str, found: re.Match[str]) -> tuple[int, int]:
    """Return start and end of the value behind a name."""
    start, name = found.end(), (found["strong"] or "").lower()
    if name == "authorization" and (scheme := _SCHEME.match(text, start)) is not None:
        start = scheme.end()
    if found["quote"]:
        if found["list"]:
            return start, _index(text, "]", start)
        if quoted := _QUOTED.get(found["quote"]):
            whole = quoted.match(text, start)
            return start, start if whole is None else whole.end()
        return start, _index(text, found["quote"], start)
    if found["joint"] == "=" and text.startswith("{", start):  # as ODBC takes passwords with signs in them
        return start, min(len(text), _index(text, "}", start) + 1)
    if found["joint"] == "=" and _IS_IN_FIELDS.search(text, max(0, found.start() - 42), found.start()):
        value = _TO_SEMICOLON
    else:
        value = _TO_LINE_END if name.startswith("cookie") else _BARE
    whole = value.match(text, start)
    return start, start if whole is None else whole.end()


def _index(text: str, part: str, start: int) -> int:
    """Return where a part of a text begins, or the end of what is looked at."""
    most = min(len(text), start + _LONGEST)
    at = text.find(part, start, most)
    return most if at < 0 else at


def _is_value(value: str, after: str, found: re.Match[str]) -> bool:
    """Return True if what follows a name in a text is a secret: prose has such names too.

    Args:
        value: its beginning.
        after: the character behind it; "" at the end of the text.
    """
    if _NO_SECRET.match(value) or (_MAY_NAME_FILE.search(found[0]) and _FILE.match(value)):
        return False
    joint, is_strong, is_quoted = found["joint"], found["strong"] is not None, bool(found["quote"])
    if "," in joint:  # a printed list of arguments: ['--password', 'x']
        before = found.string[max(0, found.start() - 42) : found.start()]
        is_named = is_strong or found["token"] is not None
        return is_quoted and _LISTED_FLAG.search(before) is not None and (is_named or _looks_random(value))
    if joint.isspace() and not is_quoted:
        is_flag = _FLAG_END.search(found.string[max(0, found.start() - 42) : found.start()]) is not None
        return _LONG.match(value) is not None or (is_flag and is_strong and not value.startswith("-"))
    if joint.isspace():
        return is_strong and _looks_random(value)
    is_json = is_quoted and found["quoted"] is not None
    if not (is_strong or (is_json and found["token"])):
        return _looks_random(value)
    # "password: required by ..." is prose, "password: hunter2" and "password=x" are not.
    is_prose = ":" in joint and joint.endswith(" ") and value.isalpha() and after == " "
    return is_quoted or not is_prose


def _is_secret_of(name: str, value: str) -> bool:
    """Return True if a value is a secret by the name of its flag or key."""
    if _NO_SECRET.match(value):
        return False
    if _NAME.search(name) is not None:
        return not (_MAY_NAME_FILE.search(name) and _FILE.match(value))
    if name == "-p" and _PARTS.search(value):
        return False
    if name in _USER_NAMES:
        return _looks_random(value.partition(":")[2])
    return _WEAK_NAME.search(name) is not None and _looks_random(value)


def _looks_random(value: str) -> bool:
    """Return True for a value of six or more characters with letters and digits, or signs as in passwords."""
    if len(value) < 6 or value.startswith(("<", "/", "./", "~")) or _DATA_TYPE.match(value):
        return False
    try:
        float(value)
    except ValueError:
        pass
    else:
        return False
    has_letters, has_digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
    return has_letters and (has_digits or any(sign in value for sign in "!@#$%^&*+=")) and " " not in value
