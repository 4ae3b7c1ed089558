"""Ranks that must run as many micro-batches as each other, and exchange gradients once."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from split_models import assert_equal, gradients, split, tiny
from transformers.modeling_outputs import CausalLMOutput

from zerofit.core.errors import UserError


class _Ranks:
    """Two ranks as threads, that take the largest of their numbers as an all-reduce does."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._numbers: dict[int, list[int]] = {}
        self.num_agreements = [0, 0]

    def max_over_ranks(self, rank: int) -> Callable[[list[int]], list[int]]:
        def largest(numbers: list[int]) -> list[int]:
            self.num_agreements[rank] += 1
            self._numbers[rank] = numbers
            self._barrier.wait()
            both = [max(pair) for pair in zip(self._numbers[0], self._numbers[1], strict=True)]
            self._barrier.wait()
            return both

        return largest

    def run(self, work: Callable[[int], None]) -> None:
        failures: list[BaseException] = []

        def guarded(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                failures.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=guarded, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # The compiler's stance is the process's: of two that set it at once, the later restores the other's.
        torch.compiler.set_stance("default")
        if failures:
            raise failures[0]


_STEPS = {
    "even": [((5, 1.0), (5, 1.0))] * 4,
    "fewer samples on one rank": [((5, 1.0), (3, 1.0)), ((5, 1.0), (1, 1.0)), ((2, 1.0), (5, 1.0))],
    "no more than one micro-batch": [((2, 1.0), (1, 1.0))],
    "another scale on one rank": [((5, 1.0), (5, float(step))) for step in (1, 2, 3)],
    "a wrong guess on one rank": [*[((5, 1.0), (5, 1.0))] * 3, ((5, 1.0), (5, 2.0)), ((5, 1.0), (5, 2.0))],
    "fewer samples where the others guess": [*[((5, 1.0), (5, 1.0))] * 2, ((5, 1.0), (2, 1.0))],
}


@pytest.mark.parametrize("steps", _STEPS.values(), ids=_STEPS)
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_every_rank_runs_as_many_micro_batches(name: str, steps: Any) -> None:
    ranks = _Ranks()
    wholes = [tiny(name)[0] for _ in (0, 1)]
    batch = tiny(name)[1]
    sides = [split(tiny(name)[0], 2, max_over_ranks=ranks.max_over_ranks(rank)) for rank in (0, 1)]
    counts: list[list[tuple[int, int]]] = [[], []]
    compared: list[Any] = []

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        made = sides[rank]
        for step in steps:
            size, factor = step[rank]
            some = {key: value[:size] for key, value in batch.items()}
            made.num_forwards = 0
            made.boundaries.clear()
            made.backward(made.model(**some).loss * factor)
            counts[rank].append((made.num_forwards, len(made.boundaries)))
            assert made.boundaries[-1]
            (wholes[rank](**some).loss * factor).backward()
            compared.append((gradients(made.model), gradients(wholes[rank])))

    ranks.run(work)
    assert counts[0] == counts[1]
    assert ranks.num_agreements[0] == ranks.num_agreements[1]
    for found, expected in compared:
        assert_equal(found, expected)


@pytest.mark.parametrize("sample", [0, 2])
def test_no_rank_goes_backward_early_with_a_loss_that_is_no_number_on_another(sample: int) -> None:
    ranks = _Ranks()
    whole, batch = tiny("vit")
    whole(**batch).loss.backward()
    expected = gradients(whole)
    broken = {**batch, "pixel_values": batch["pixel_values"].clone()}
    broken["pixel_values"][sample] = torch.nan
    sides = [split(tiny("vit")[0], 2, max_over_ranks=ranks.max_over_ranks(rank)) for rank in (0, 1)]
    found: list[Any] = [None, None]
    counts: list[list[int]] = [[], []]

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        made = sides[rank]
        for _ in range(2):
            made.backward(made.model(**batch).loss)
            gradients(made.model)
        loss = made.model(**(broken if rank == 1 else batch)).loss
        assert loss.isnan() == (rank == 1)
        counts[rank].append(len(made.boundaries))
        made.pending.settle()  # the script skips this step on all ranks
        counts[rank].append(len(made.boundaries))
        made.backward(made.model(**batch).loss)
        found[rank] = gradients(made.model)

    ranks.run(work)
    assert ranks.num_agreements[0] == ranks.num_agreements[1]
    num_early = 1 if sample == 2 else 0  # the sample's own micro-batch is the second
    assert counts == [[6 + num_early, 6 + 2 * num_early]] * 2
    for one in found:
        assert_equal(one, expected)


def _alone(numbers: list[int]) -> list[int]:
    return numbers


@pytest.mark.parametrize(("can_run_alone", "num_forwards"), [(True, 3), (False, 0)])
def test_outputs_come_without_a_forward_pass_where_a_rank_cannot_run_it_alone(
    can_run_alone: bool, num_forwards: int
) -> None:
    model, batch = tiny("vit")
    expected = model(**batch).logits
    made = split(model, 2, max_over_ranks=_alone, can_run_alone=can_run_alone)
    for more in (num_forwards, 0):
        outputs = model(**batch)
        made.num_forwards = 0
        torch.testing.assert_close(outputs.logits, expected)
        assert made.num_forwards == more


def test_outputs_that_nobody_looks_at_are_kept_on_the_host_in_the_first_passes_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zerofit.training.batch.micro_batches.splitter._PASSES_KEPT", 2)
    model, batch = tiny("gpt2")
    logits: list[Any] = []
    model.lm_head.register_forward_hook(lambda layer, _, output: logits.append(weakref.ref(output)))
    made = split(model, 2, max_over_ranks=_alone, can_run_alone=False)
    moved: list[str] = []
    to = torch.Tensor.to

    def noted(one: Any, *args: Any, **kwargs: Any) -> Any:
        moved.extend(args)
        return to(one, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    for num_moved in (3, 3, 0, 0):
        moved.clear()
        logits.clear()
        outputs = model(**batch)
        assert moved.count("cpu") == num_moved
        if not num_moved:
            assert sum(one() is not None for one in logits) <= 1  # the last one waits with its graph
        made.backward(outputs.loss)
    assert made.pending.is_any
    with pytest.raises(UserError) as error:
        _ = outputs.logits
    assert (error.value.rule, error.value.found) == ("output-read-late", "outputs.logits")


def test_an_output_that_cannot_be_joined_is_refused_only_when_the_script_looks_at_it() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 4)

        def forward(self, x: Any) -> Any:
            states = self.linear(x)
            longest = int(x[:, 0].max()) + 1
            return CausalLMOutput(loss=states.pow(2).mean(), logits=states.new_ones(1, longest))

    model = Model()
    made = split(model, 2, max_over_ranks=_alone, can_run_alone=False)
    x = torch.tensor([[number, 1.0, 2.0] for number in range(6)])
    outputs = model(x)
    made.backward(outputs.loss)
    with pytest.raises(UserError, match="can't be split"):
        _ = outputs.logits


def test_all_pieces_but_the_last_keep_their_gradients() -> None:
    inside = []
    synced: list[bool] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    model, batch = tiny("vit")
    made = split(model, 2, no_sync=no_sync)
    run = made.run
    made.run = lambda loss, is_boundary: (synced.append(not inside), run(loss, is_boundary))
    for is_boundary, expected in [(True, [False, False, True]), (False, [False] * 3)] * 2:
        synced.clear()
        made.backward(model(**batch).loss, is_boundary=is_boundary)
        if len(synced) == 1:  # the others went backward in the forward pass
            expected = expected[2:]
        assert synced[-len(expected) :] == expected


def test_distributed_data_parallel_reduces_once(tmp_path: Any) -> None:
    model, batch = tiny("vit")
    (model(**batch).loss * 3).backward()
    expected = {f"module.{name}": one for name, one in gradients(model).items()}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(model)
        reduced: list[Any] = []

        def reduce(_, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
            future: Any = torch.futures.Future()
            future.set_result(bucket.buffer())
            reduced.append(future)
            return future

        parallel.register_comm_hook(None, reduce)
        made = split(parallel, 2, no_sync=parallel.no_sync)
        for factor in (3, 3, 3, 3, 6, 3):
            reduced.clear()
            made.backward(parallel(**batch).loss * factor)
            found = gradients(parallel)
            assert len(reduced) == 1
            assert_equal({name: one * 3 / factor for name, one in found.items()}, expected)
        with parallel.no_sync():
            reduced.clear()
            made.backward(parallel(**batch).loss * 3)
            assert reduced == []
    finally:
        torch.distributed.destroy_process_group()
