"""What the site shows of links that leave docs/, and of flags."""

from __future__ import annotations

import pytest

from tools.site_links import on_page_content, on_page_markdown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("[a notebook](../examples/colab.ipynb)", "a notebook (`examples/colab.ipynb`)"),
        ("[`ds_configs/`](../ds_configs/)", "`ds_configs/`"),
        ("[plan](plan.md)", "[plan](plan.md)"),
    ],
)
def test_a_link_that_leaves_the_pages_becomes_a_path(text: str, shown: str) -> None:
    assert on_page_markdown(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "<p><code>zerofit VERB --help-all</code></p>",
            '<p><code>zerofit VERB <span class="flag">--help-all</span></code></p>',
        ),
        (
            "<td><code>--lora</code>, <code>--qlora 3</code></td>",
            '<td><code><span class="flag">--lora</span></code>, '
            '<code><span class="flag">--qlora</span> 3</code></td>',
        ),
        (
            "<pre><code>zerofit plan --seq-len 1\n</code></pre>",
            "<pre><code>zerofit plan --seq-len 1\n</code></pre>",
        ),
        ("<p>a -- b <code>a--b-c</code></p>", "<p>a -- b <code>a--b-c</code></p>"),
    ],
)
def test_a_flag_stays_on_one_line(text: str, shown: str) -> None:
    assert on_page_content(text) == shown
