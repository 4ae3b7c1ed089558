"""A hook of mkdocs: links to files beside docs/ become their paths, as the site holds docs/ alone."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text without links that leave docs/."""

    def path(link: re.Match[str]) -> str:
        words, target = link.groups()
        return f"{words} (`{target}`)" if words.strip("`") != target else words

    return _OUTSIDE.sub(path, markdown)
