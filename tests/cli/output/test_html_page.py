"""The pages of `zerofit plan --html` and `zerofit runs show --html`: what is in them, and what they may do.

Those of a browser need one: CI has none.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from captures import LOOP
from planning_problems import LARGE, problem, solved
from run_folders import NAME, OUT_OF_MEMORY, PLAN, RECOVERY, write_run

from zerofit.cli.output.html_page import Html, element, page
from zerofit.cli.output.plan_html import plan_html
from zerofit.cli.output.plan_rows import plan_rows
from zerofit.cli.output.run_comparison import shown_run
from zerofit.cli.output.run_html import run_html
from zerofit.core.estimates import StepTime
from zerofit.core.plan import Plan
from zerofit.launching.clusters.follow import followed_run
from zerofit.planning.plan_labels import label

_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]
_HOSTILE = (
    "<script>document.title='broken'</script>",
    '"><img src=x onerror="document.title=\'broken\'">',
    "'><svg/onload=document.title='broken'>",
    "</title></style></script><script>document.title='broken'</script>",
    "&lt;script&gt;\u202e\x1b[31m",
)
_QUICK = ("--gpus", "1xRTX4090", "--model", "gpt2", "--seq-len", "512", "--global-batch-size", "8", "--fast")
_BY_NETWORK = ("src", "href", "srcset", "data", "action", "poster", "background", "formaction")
"""Attributes by which a page fetches something, or leads elsewhere."""


class _Page(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)


def _hostile_plan(text: str) -> Plan:
    """Return a plan whose names are a text."""
    assert PLAN.estimate is not None
    device = PLAN.estimate.device
    terms = tuple(replace(term, name=text, formula=text, source=text) for term in device.phases[2].terms)
    phases = (*device.phases[:2], replace(device.phases[2], terms=terms), *device.phases[3:])
    estimate = replace(PLAN.estimate, device=replace(device, phases=phases, uncertainty_source=text))
    gpus = tuple(replace(gpu, name=text) for gpu in PLAN.machine.gpus)
    assert PLAN.model is not None
    return replace(
        PLAN,
        model=replace(PLAN.model, name=text, architecture=text, model_type=text),
        capture=replace(LOOP, model=replace(LOOP.model, name=text, class_path=text)),
        machine=replace(PLAN.machine, gpus=gpus),
        versions=replace(PLAN.versions, torch=text, zerofit=text),
        reasons=(replace(PLAN.reasons[0], field=text, value=text, why=text),),
        estimate=estimate,
    )


def _run_page(folder: Path, **written: Any) -> str:
    return run_html(shown_run(followed_run(write_run(folder, **written))))


def _hostile_page(folder: Path, text: str) -> str:
    recovery = {**RECOVERY, "strategy": text, "strategy_before": text, "resumed_from": text, "cause": text}
    record = {"exit_code": 1, "cause": text, "kind": "script-error", "recoveries": [recovery]}
    log = f'Traceback (most recent call last):\n  File "{text}", line 1, in x\nRuntimeError: {text}\n'
    return _run_page(folder / NAME, plan=_hostile_plan(text), record=record, log=f"{log}{OUT_OF_MEMORY}")


def _check_self_contained(text: str) -> _Page:
    """Check that a page is well-formed, names nothing to fetch, and has one script."""
    found = _Page(text)
    assert found.open == []
    names = [name for name, _ in found.elements]
    assert not {"link", "img", "iframe", "object", "embed", "base", "svg", "a", "form"} & set(names)
    assert names.count("script") == names.count("style") == names.count("title") == 1
    for _, attributes in found.elements:
        assert not set(attributes) & set(_BY_NETWORK)
        assert not any(name.startswith("on") for name in attributes)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert "url(" not in style
    assert "@import" not in style
    return found


@pytest.mark.parametrize("text", _HOSTILE)
def test_names_of_others_are_text_in_a_page(tmp_path: Path, text: str) -> None:
    found = _check_self_contained(_hostile_page(tmp_path, text))
    assert "broken" not in dict(found.elements)
    shown = "".join(found.words)
    if "\x1b" not in text:
        assert shown.count(text) > 15
    assert "\x1b" not in shown
    assert "\u202e" not in shown


@pytest.mark.parametrize("text", _HOSTILE)
def test_an_element_escapes_all_but_html(text: str) -> None:
    made = element("p", text, Html("<b>1</b>"), title=text)
    found = _Page(made)
    assert [name for name, _ in found.elements] == ["p", "b"]
    assert not set(found.elements[0][1]) - {"title"}


def test_a_page_allows_its_own_script_alone(tmp_path: Path) -> None:
    text = _run_page(tmp_path / NAME)
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert html.unescape(policy) == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; "
        "form-action 'none'"
    )


def test_a_run_is_shown_beside_its_prediction(tmp_path: Path) -> None:
    record = {"exit_code": 1, "cause": "rank 0 was out of GPU memory", "recoveries": [RECOVERY]}
    text = _run_page(tmp_path / NAME, record=record, log=OUT_OF_MEMORY)
    words = " ".join("".join(_check_self_contained(text).words).split())
    for said in (
        "It failed after 20 steps with exit code 1: rank 0 was out of GPU memory",
        "tensors, at most: 5.1 GiB measured, 5.0 GiB ±5% predicted (-1.2%, within its ±)",
        "reserved by PyTorch, at most: 6.1 GiB measured, 5.2 GiB ±5% predicted (-13.4%, beyond its ±)",
        "step: 450 ms measured, 400 ms ±30% predicted (-11.1%, within its ±)",
        "out of memory after step 7 with DeepSpeed ZeRO-1: resumed from out/checkpoints/step_5",
        "cause: out of GPU memory, rank 0 [gpu-out-of-memory, confidence high]",
        "zero_stage = 2",
        "memory of each GPU, backward: 5.8 GiB, the peak",
        "28 P / bandwidth",
    ):
        assert said in words


def test_runs_show_prints_both_sides_and_writes_the_page(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME)
    done = run_zerofit("runs", "show", "--html", "out/run.html", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert " ".join(done.stdout.split("\n\n")[1].split()) == (
        "predicted measured error "
        "tensors, at most 5.0 GiB ±5% 5.1 GiB -1.2% "
        "reserved by PyTorch, at most 5.2 GiB ±5% 6.1 GiB -13.4% "
        "tensors in load 1.0 GiB - - "
        "tensors in forward 4.0 GiB 4.1 GiB -1.5% "
        "tensors in backward 5.0 GiB 5.1 GiB -1.2% "
        "tensors in step 2.0 GiB - - "
        "step 400 ms ±30% 450 ms -11.1% "
        "host memory of a rank - 2.1 GiB -"
    )
    _check_self_contained((tmp_path / "out" / "run.html").read_text())


def test_a_plan_has_the_answer_first_and_every_strategy_and_term() -> None:
    answer = solved(problem(facts=LARGE, num_gpus=8, memory_gib=36, global_batch_size=8))
    assert answer.chosen is not None
    found = _check_self_contained(plan_html(answer, about=["<about>"], command="zerofit launch 'a b.py'"))
    words = "".join(found.words)
    chosen = label(answer.chosen.strategy, answer.problem.topology)
    places = [words.index(f"what fits: {chosen}"), words.index("zerofit launch 'a b.py'")]
    places += [
        words.index(text) for text in ("Memory of each GPU by phase", "Strategies", "Every term", "<about>")
    ]
    assert places == sorted(places)
    estimate = answer.chosen.estimate
    phases = (*estimate.device.phases, *estimate.host.phases)
    terms = [*(term for phase in phases for term in phase.terms), *(estimate.step_time or _NO_TIME).terms]
    assert len(terms) > 20
    assert [term for term in terms if term.formula not in words or term.source not in words] == []
    sizes = [attributes.get("data-value") for _, attributes in found.elements if _is_size(attributes)]
    assert sizes == [str(row.least_bytes) for row in plan_rows(answer)]
    assert sum(attributes.get("class") == "chosen" for _, attributes in found.elements) == 1


_NO_TIME = StepTime(terms=(), uncertainty=0.0, uncertainty_source="")


def _is_size(attributes: dict[str, str | None]) -> bool:
    return attributes.get("data-name") == "GPU GiB"


def test_a_plan_without_a_choice_shows_what_would_fit_on_these_gpus() -> None:
    answer = solved(problem(facts=LARGE, num_gpus=1, memory_gib=18, host_gib=20, global_batch_size=8))
    assert not answer.fits
    rows = plan_rows(answer)
    changes = [row.role for row in rows if row.fits]
    assert changes
    assert all(role.startswith("with ") and "GPU" not in role and "host" not in role for role in changes)
    words = "".join(_check_self_contained(plan_html(answer)).words)
    assert "Nothing fits. Nearest is " in words
    assert [role for role in changes if role not in words] == []


@pytest.mark.parametrize(("verb", "flags"), [("plan", _QUICK), ("runs", ("show",))])
def test_a_page_is_written_over_a_page_but_over_no_other_file(
    tmp_path: Path, run_zerofit: _RunZerofit, verb: str, flags: tuple[str, ...]
) -> None:
    write_run(tmp_path / "zerofit-runs" / NAME)
    line = (verb, *flags, "--html", "page.html")
    (tmp_path / "page.html").write_text("<!DOCTYPE html>\n<p>mine")
    refused = run_zerofit(*line, cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "error[file-exists]: the file exists and differs\n  found: page.html\n" in refused.stderr
    assert (tmp_path / "page.html").read_text() == "<!DOCTYPE html>\n<p>mine"
    assert run_zerofit(*line, "--force", cwd=tmp_path).returncode == 0
    again = run_zerofit(*line, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    _check_self_contained((tmp_path / "page.html").read_text())


def test_html_and_several_machines_are_refused_together(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    line = ("plan", "--gpus", "1xRTX4090", "--gpus", "1xH100-80G", *_QUICK[2:], "--html", "plan.html")
    done = run_zerofit(*line, cwd=tmp_path)
    assert done.returncode == 2
    assert "found: --gpus 1xRTX4090 --gpus 1xH100-80G with --html" in done.stderr


_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_in_browser = pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium")


def _dom(file: Path, *flags: str) -> str:
    """Return what a page has become in a browser."""
    assert _CHROMIUM is not None
    command = (
        *(_CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *(f"--user-data-dir={file.parent / 'browser'}", "--virtual-time-budget=2000", "--dump-dom", *flags),
        file.as_uri(),
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def _with_script(text: str, script: str) -> str:
    """Return a page with one more script, which its policy allows by its digest too."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    more = html.escape(f"'sha256-{digest}'; base-uri")
    allowed = text.replace(html.escape("; base-uri"), f" {more}")
    assert allowed != text
    return allowed.replace("</body>", f"<script>{script}</script>\n</body>")


_CLICK = """
const at = name => [...document.querySelectorAll("table.sorts")[0].tHead.rows[0].cells]
  .findIndex(head => head.textContent.startsWith(name));
const click = name => document.querySelectorAll("table.sorts")[0].tHead.rows[0].cells[at(name)]
  .querySelector("button").click();
const column = name => [...document.querySelectorAll("table.sorts")[0].tBodies[0].rows]
  .map(row => row.cells[at(name)].dataset.value ?? row.cells[at(name)].textContent);
const seen = [column("GPU GiB")];
click("GPU GiB"); seen.push(column("GPU GiB"));
click("GPU GiB"); seen.push(column("GPU GiB"));
click("strategy"); seen.push(column("strategy"));
click("step"); seen.push(column("step"));
document.title = JSON.stringify(seen);
"""


@pytest.mark.slow
@_in_browser
def test_a_click_sorts_by_numbers_and_names(tmp_path: Path, run_zerofit: _RunZerofit) -> None:
    assert run_zerofit("plan", *_QUICK, "--html", "plan.html", cwd=tmp_path).returncode == 0
    file = tmp_path / "plan.html"
    file.write_text(_with_script(file.read_text(), _CLICK))
    (title,) = re.findall(r"<title>(.*?)</title>", _dom(file))
    before, up, down, names, times = json.loads(html.unescape(title))
    sizes = [int(size) for size in before]
    assert len(set(sizes)) > 2
    assert [int(size) for size in up] == sorted(sizes)
    assert [int(size) for size in down] == sorted(sizes, reverse=True)
    assert names == sorted(names, key=str.casefold)
    known = [float(time) for time in times if time]
    assert times == [str(time) for time in sorted(known)] + [""] * (len(times) - len(known))


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """A server's address, and the paths that it was asked for."""
    asked: list[str] = []

    class Asked(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def _asking(address: str) -> str:
    return (
        f"<img src={address}/image><script>fetch('{address}/script')</script>"
        f'<link rel=stylesheet href={address}/style><b style="background:url({address}/background)">b</b>'
    )


@_in_browser
def test_no_request_leaves_a_page_even_if_a_name_were_not_escaped(
    tmp_path: Path, requests: tuple[str, list[str]]
) -> None:
    address, asked = requests
    plain = tmp_path / "plain.html"
    plain.write_text(f"<!DOCTYPE html><title>t</title>{_asking(address)}")
    _dom(plain)
    assert {"/image", "/script", "/style", "/background"} <= set(asked)  # a browser here does ask
    asked.clear()
    file = tmp_path / "run.html"
    file.write_text(_hostile_page(tmp_path, _asking(address)))
    assert "<title>" in _dom(file)
    file.write_text(page("t", Html(_asking(address))))
    _dom(file)
    assert asked == []


@_in_browser
def test_hostile_names_run_no_script(tmp_path: Path) -> None:
    file = tmp_path / "run.html"
    file.write_text(_hostile_page(tmp_path, " ".join(_HOSTILE)))
    assert f"<title>{NAME}: run</title>" in _dom(file)


_WIDTH = """
const page = document.documentElement;
page.style.zoom = ZOOM;
const out = [...document.querySelectorAll("main *")].filter(
  part => part.getBoundingClientRect().right > innerWidth + 1
);
document.title = JSON.stringify([innerWidth, out.map(part => part.outerHTML.slice(0, 80))]);
"""


@pytest.mark.slow
@_in_browser
@pytest.mark.parametrize(("width", "zoom"), [(500, 1.25), (1200, 1)])
def test_nothing_is_beyond_the_edge_of_a_window(
    tmp_path: Path, run_zerofit: _RunZerofit, width: int, zoom: float
) -> None:
    """500 is the narrowest window of headless Chromium; what is 1.25 times as large has 400 there."""
    assert run_zerofit("plan", *_QUICK, "--html", "plan.html", cwd=tmp_path).returncode == 0
    text = _hostile_page(tmp_path, "a_name_without_a_space" * 20)
    for name, content in (("plan", (tmp_path / "plan.html").read_text()), ("run", text)):
        file = tmp_path / f"{name}.html"
        file.write_text(_with_script(content, _WIDTH.replace("ZOOM", str(zoom))))
        (title,) = re.findall(r"<title>(.*?)</title>", _dom(file, f"--window-size={width},900"))
        inner, out = json.loads(html.unescape(title))
        assert inner <= width + 2
        assert out == []
