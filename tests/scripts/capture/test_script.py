"""A script is captured, traced and cached."""

from __future__ import annotations

import time
from contextlib import nullcontext

import pytest

from zerofit.cli.output.console import Console
from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.observer import Observer

_REQUEST = TraceRequest(sequence_length=8)


def test_a_capture_is_returned_and_nothing_stays(workplace) -> None:
    workplace.write("import training\nopen('out.txt', 'w').write('x')\ntraining.begin()\n")
    with workplace.capture() as script:
        assert script.capture.target == ("train.py",)
        assert script.capture.model.name == "made"
        assert len(workplace.processes()) == 2  # the script, and what supervises it
    assert workplace.processes() == []
    assert [path.name for path in workplace.cwd.iterdir()] == ["train.py"]
    assert list((workplace.cache / "capturing").iterdir()) == []


def test_the_script_runs_as_one_quiet_process_without_gpus(workplace) -> None:
    workplace.environment |= {"ACCELERATE_USE_DEEPSPEED": "true", "WORLD_SIZE": "8", "MLFLOW_RUN_ID": "a"}
    workplace.environment |= {"GROUP_NAME": "a", "ROLE_ARN": "b", "FP8_MINE": "c", "DYNAMO_TABLE": "d"}
    workplace.environment |= {"GROUP_RANK": "3", "ROLE_NAME": "e", "TORCHELASTIC_RUN_ID": "f"}
    workplace.write(
        """
        import os, sys, torch_free_check, training
        told = {name: os.environ.get(name) for name in (
            "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "WANDB_MODE",
            "ACCELERATE_USE_DEEPSPEED", "MLFLOW_RUN_ID")}
        assert told == {
            "CUDA_VISIBLE_DEVICES": "", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "WANDB_MODE": "disabled", "ACCELERATE_USE_DEEPSPEED": None,
            "MLFLOW_RUN_ID": None}, told
        names = ("GROUP_NAME", "ROLE_ARN", "FP8_MINE", "DYNAMO_TABLE")
        assert [os.environ[name] for name in names] == ["a", "b", "c", "d"]
        assert not {"GROUP_RANK", "ROLE_NAME", "TORCHELASTIC_RUN_ID"} & os.environ.keys()
        assert os.environ["MLFLOW_TRACKING_URI"].startswith("file:///")
        assert os.getsid(0) == os.getppid() and sys.stdin.read() == ""
        training.begin()
        """
    )
    workplace.write("import sys\nassert 'torch' not in sys.modules\n", name="torch_free_check.py")
    with workplace.capture():
        pass


def test_the_second_time_a_capture_comes_from_the_cache(workplace) -> None:
    workplace.write_counted("import training\ntraining.begin()\n")
    with workplace.capture("--lr", "1") as first:
        pass
    with workplace.capture("--lr", "1") as second:
        assert second.capture == first.capture
        assert second.key == first.key
        assert workplace.processes() == []
    assert workplace.runs() == 1


_READS = """
import os, training, helper
open("data.json").read()
from_cache = "shards/train.json"
os.environ.get("MY_MODEL")
training.begin()
"""
_CHANGES = {
    "nothing": (lambda place: None, False),
    "its text": (lambda place: place.write("# more\n" + (place.cwd / "train.py").read_text()), True),
    "a module that it imports": (lambda place: place.write("y = 2\n", name="helper.py"), True),
    "a file that it reads": (lambda place: place.write('{"more": 1}', name="data.json"), True),
    "a file that its code names": (lambda place: place.write("{1}", name="shards/train.json"), True),
    "a file in a folder of an argument": (lambda place: place.write("b", name="texts/b.txt"), True),
    "a file beside": (lambda place: place.write("b", name="notes.txt"), False),
    "a variable of a library": (lambda place: place.environment.update(HF_DATASETS_OFFLINE="1"), True),
    "a variable that its code names": (lambda place: place.environment.update(MY_MODEL="b"), True),
    "another variable": (lambda place: place.environment.update(PROMPT="b"), False),
}


@pytest.mark.slow
def test_a_change_of_what_decides_a_capture_makes_it_anew(workplace) -> None:
    workplace.write_counted(_READS)
    workplace.write("x = 1\n", name="helper.py")
    workplace.write("{}", name="data.json")
    workplace.write("{}", name="shards/train.json")
    workplace.write("a", name="texts/a.txt")
    ran_anew = {}
    workplace.capture("--texts=texts", "--out", "out").close()
    for what, (change, _) in _CHANGES.items():
        before = workplace.runs()
        change(workplace)
        time.sleep(0.02)  # what changes in the very moment of a capture is not kept
        workplace.capture("--texts=texts", "--out", "out").close()
        ran_anew[what] = workplace.runs() > before
    assert ran_anew == {what: expected for what, (_, expected) in _CHANGES.items()}


def test_a_failure_is_not_kept(workplace) -> None:
    workplace.write_counted("import os\nos._exit(1)\n")
    for _ in range(2):
        with pytest.raises(UserError):
            workplace.capture()
    assert workplace.runs() == 2


def test_a_trace_comes_from_the_process_that_holds_the_model_and_then_from_the_cache(workplace) -> None:
    workplace.write_counted("import training\ntraining.begin()\n")
    with workplace.capture() as script:
        trace = script.trace(_REQUEST)
        assert len(trace.logs) == 1
    assert workplace.processes() == []
    with workplace.capture() as script:
        assert script.trace(_REQUEST) == trace
        assert workplace.runs() == 1
        assert script.trace(TraceRequest(sequence_length=16)).logs == trace.logs
        assert workplace.runs() == 2
    assert workplace.processes() == []


_DRAWN = """
    import time, training
    now = time.time()
    training.begin(seed=int(now * 1e6), trainer_arguments={"output_dir": str(now), "data_seed": now})
"""


def test_a_capture_of_before_stays_where_the_script_runs_again_for_its_model(workplace, capsys) -> None:
    workplace.write_counted(_DRAWN)
    with workplace.capture(observer=Console()) as script:
        first = script.capture
        assert not script.is_cached
    assert capsys.readouterr().err == "zerofit: capturing what train.py trains, up to its first step ...\n"
    with workplace.capture(observer=Console()) as script:
        assert (script.capture, script.is_cached) == (first, True)
        assert capsys.readouterr().err == ""
        script.trace(_REQUEST)
        assert script.capture == first
    assert capsys.readouterr().err == (
        "zerofit: train.py runs again up to its first step: its capture is cached, but its model is "
        "needed again ...\n"
    )
    with workplace.capture() as script:
        assert script.capture == first


def test_a_script_that_trains_another_model_the_second_time_is_not_planned_for(workplace) -> None:
    workplace.write("import time, training\ntraining.begin(micro_batch_size=time.time_ns() % 10**9)\n")
    with workplace.capture() as script:
        first = script.capture
    with workplace.capture() as script:
        with pytest.raises(UserError) as error:
            script.trace(_REQUEST)
        assert script.capture == first
    assert (error.value.rule, error.value.found) == (
        "script-trains-another",
        "same arguments and files, but not the same micro batch size",
    )
    assert workplace.processes() == []
    with workplace.capture() as script:  # the run of now is kept in place of the first
        assert script.capture != first


_ANSWERS = [
    (
        "dies",
        "error[capture-trace-ended]: the process with the model of train.py ended while its memory was "
        "traced\n"
        "  found: at the end it printed\n"
        "         | tracing\n"
        "  why:   the model's own code runs there on tensors without values, which may crash it\n"
        "  fix:   describe what it trains: `--model DIR --seq-len N --global-batch-size N`",
    ),
    (
        "hangs",
        "error[capture-trace-slow]: tracing the memory of the model of train.py takes too long\n"
        "  found: no answer from its process in 0.3 s\n"
        "  why:   the model's own code runs there on tensors without values\n"
        "  fix:   describe what it trains: `--model DIR --seq-len N --global-batch-size N`",
    ),
    ("refuses", "error[trace-odd]: it can't\n  found: this\n  why:   that\n  fix:   so"),
]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        pytest.param(*case, id=case[0], marks=pytest.mark.slow if number else ())
        for number, case in enumerate(_ANSWERS)
    ],
)
def test_a_model_that_can_not_be_traced_is_an_error(workplace, monkeypatch, answer, message) -> None:
    monkeypatch.setattr("zerofit.scripts.capture.capture._TRACE_LIMIT_S", 0.3)
    workplace.write(f"import training\nprint('tracing')\ntraining.begin({answer!r})\n")
    with workplace.capture() as script, pytest.raises(UserError) as caught:
        script.trace(_REQUEST)
    assert str(caught.value) == message
    assert workplace.processes() == []


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(workplace, monkeypatch) -> None:
    monkeypatch.setattr("zerofit.scripts.capture.capture._TRACE_LIMIT_S", 0.3)
    workplace.write_counted("import training\ntraining.begin('is late')\n")
    with workplace.capture() as script:
        with pytest.raises(UserError, match="capture-trace-slow"):
            script.trace(_REQUEST)
        assert workplace.processes() == []
        time.sleep(0.5)
        with pytest.raises(UserError, match="capture-trace-ended"):
            script.trace(TraceRequest(sequence_length=16))
    assert workplace.runs() == 1


def test_a_script_that_needs_its_weights_gets_them_where_they_fit(workplace) -> None:
    workplace.write(
        """
        import training
        if training.weights == "meta":
            training.fail("needs-values", weight_bytes=1000)
        training.begin()
        """
    )
    with workplace.capture() as script:
        assert script.capture.model.name == "made"


_TWICE = """
import os, training
assert open("log.txt").read() == "keep me\\n", "the first attempt is not undone"
assert not os.path.exists("out")
assert os.environ.get("HF_HUB_OFFLINE") == ("1" if training.weights == "real" else None)
open("log.txt", "w").write(training.weights)
os.mkdir("out")
if training.weights == "meta":
    training.fail("needs-values", weight_bytes=0)
training.begin()
"""


def test_the_second_attempt_finds_the_files_as_they_were_and_downloads_nothing(workplace) -> None:
    workplace.environment.pop("HF_HUB_OFFLINE", None)
    workplace.write("keep me\n", name="log.txt")
    workplace.write(_TWICE)
    with workplace.capture():
        assert (workplace.cwd / "log.txt").read_text() == "real"
    assert (workplace.cwd / "log.txt").read_text() == "keep me\n"
    assert not (workplace.cwd / "out").exists()


def test_a_failure_with_weights_says_so(workplace) -> None:
    workplace.write(
        """
        import training
        if training.weights == "meta":
            training.fail("needs-values", weight_bytes=1)
        training.fail("raised")
        """
    )
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert caught.value.why == (
        "it ran as one process without a GPU, with its weights, after it had failed without them, and "
        "without downloads"
    )


def test_weights_of_unknown_size_are_not_loaded(workplace) -> None:
    workplace.write_counted("import training\ntraining.fail('needs-values')")
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert caught.value.why == (
        "zerofit runs it without loading weights; their size is unknown, so they were not loaded"
    )
    assert workplace.runs() == 1


def test_weights_that_do_not_fit_are_not_loaded(workplace, monkeypatch) -> None:
    monkeypatch.setattr("zerofit.scripts.capture.capture.free_host_bytes", lambda: 8 << 30)
    workplace.write_counted(f"import training\ntraining.fail('needs-values', weight_bytes={6 << 30})")
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert str(caught.value) == (
        "error[capture-needs-weights]: train.py reads its weights before training\n"
        "  found: it failed   (train.py:1)\n"
        "  why:   zerofit runs it without loading weights; they take 6.0 GiB, and 8.0 GiB of host memory "
        "is free\n"
        "  fix:   describe what it trains: `--model DIR --seq-len N --global-batch-size N`"
    )
    assert workplace.runs() == 1


def test_what_the_script_prints_last_is_told_meanwhile(workplace) -> None:
    workplace.write(
        "import time, training\nprint('Tokenizing: 12%', end='\\r')\ntime.sleep(1)\ntraining.begin()\n"
    )
    told: list[str] = []
    observer = Observer()
    observer.task = lambda title, **_: nullcontext(told.append)
    workplace.capture(observer=observer).close()
    assert told == ["Tokenizing: 12%"]
