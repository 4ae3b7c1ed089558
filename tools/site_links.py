"""A hook of mkdocs: links to files beside docs/ become their paths, as the site holds docs/ alone.

Flags stay on one line.
"""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)(?:#[^)]*)?\)")
_INLINE = re.compile(r"(?s)<pre.*?</pre>|<code>[^<]*</code>")
_FLAG = re.compile(r"(?<![\w-])--[a-z]\w*(?:-\w+)*")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page's text without links that leave docs/."""

    def path(link: re.Match[str]) -> str:
        words, target = link.groups()
        return f"{words} (`{target}`)" if words.strip("`") != target else words

    return _OUTSIDE.sub(path, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML with each flag in an element: browsers break lines behind hyphens."""

    def whole(found: re.Match[str]) -> str:
        text = found[0]
        return text if text.startswith("<pre") else _FLAG.sub(r'<span class="flag">\g<0></span>', text)

    return _INLINE.sub(whole, html)
