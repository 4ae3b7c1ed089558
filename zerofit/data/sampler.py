"""Batches of samples of like length for training, right under many ranks and resumable within an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

from zerofit.core.errors import UserError
from zerofit.data.bucketing import (
    as_lengths,
    batches_undefined,
    check_sizes,
    epoch_of,
    is_whole,
    rounds_of_samples,
    rounds_of_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class LengthGroupedBatches:
    """A batch sampler: `DataLoader(dataset, batch_sampler=LengthGroupedBatches(lengths, batch_size=32))`.

    Every sample comes exactly once in an epoch, every rank has the same number of batches, and none is empty.
    Where a rank would be without a sample in the last round, and no round has one to give (batches of one
    sample, or fewer samples than ranks), as few samples as needed come twice. All of it follows from the
    lengths, the seed and the epoch: ranks need not talk to each other. In the last rounds, and in all that
    are cut by max_tokens, the ranks' batches may differ in size, so what has one row for each sample can't be
    gathered from them as it is.

    Without `rank` it yields the batches of all ranks, in turn: what `accelerator.prepare()` counts on, which
    then takes each rank's own. With `rank` it yields those of one rank alone, for loops without accelerate,
    which would deal these out again: it is refused there.

    The epoch goes up by itself when all of its batches were read; one that the loop leaves early begins anew,
    under accelerate too. `set_epoch()` sets it.

    Args:
        lengths: tokens of each sample, one number for each index of the dataset.
        batch_size: samples of one batch on one rank; the most of them where max_tokens is given too.
        max_tokens: tokens of one batch on one rank at most, padding to a multiple of 8 counted.
        num_ranks: data-parallel ranks.
        rank: the rank whose batches these are; None for those of all ranks in turn.
        seed: the same on every rank.
        drop_last: whether the samples that do not fill a round are left out, other ones in each epoch. Not
            with max_tokens.
        pack_last: whether the last round is packed as torch's own BatchSampler does, full batches first, and
            the ranks without one are left to accelerate, which gives them samples that were there before.
            Only for the batches of all ranks.

    Raises:
        UserError: there are no lengths, the arguments contradict each other, or a sample is longer than
            max_tokens.
    """

    def __init__(
        self,
        lengths: Any,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        num_ranks: int = 1,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pack_last: bool = False,
    ) -> None:
        check_sizes(batch_size=batch_size, max_tokens=max_tokens)
        _check(num_ranks, rank, seed, by_tokens=max_tokens is not None, drops=drop_last, packs=pack_last)
        self._lengths = as_lengths(lengths)
        if max_tokens is not None:
            self._rounds = rounds_of_tokens(
                self._lengths, max_tokens=max_tokens, num_ranks=num_ranks, most_samples=batch_size
            )
        else:
            self._rounds = rounds_of_samples(
                len(self._lengths),
                batch_size=batch_size or 1,
                num_ranks=num_ranks,
                drop_last=drop_last,
                pack_last=pack_last,
            )
        self._rank = rank
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._is_resuming = False
        self._was_loaded = False
        self.drop_last = drop_last
        self.batch_size = self._rounds.batch_size if num_ranks == 1 or drop_last or pack_last else None
        """Samples of each batch but the last one; None where other batches may differ too. accelerate fills
        batches up to it, and takes them as they are where it is None (accelerate/data_loader.py,
        BatchSamplerShard)."""

    @property
    def sampler(self) -> LengthGroupedBatches:
        """What accelerate tells the epoch: it looks for `batch_sampler.sampler` (accelerate/data_loader.py,
        DataLoaderShard.set_epoch).

        Raises:
            UserError: these are the batches of one rank, of which accelerate would give each rank but a part.
        """
        if self._rank is not None and self._rounds.num_ranks > 1:
            raise UserError(
                "batches-dealt-twice",
                "accelerate is given the batches of one rank",
                found=f"rank={self._rank} of {self._rounds.num_ranks} ranks, in a DataLoader for accelerate",
                why="it deals them to the ranks once more, and most samples would never be read",
                fix=f"leave rank out: LengthGroupedBatches(..., num_ranks={self._rounds.num_ranks})",
            )
        return self

    @property
    def epoch(self) -> int:
        """The epoch whose batches come, or come next."""
        return self._epoch

    @property
    def seed(self) -> int:
        """What the order of the samples comes from, with the epoch."""
        return self._seed

    @property
    def num_repeated(self) -> int:
        """Samples that come twice in an epoch, over all ranks."""
        return self._rounds.num_repeated

    def __len__(self) -> int:
        """Return the batches of one epoch; the same number in every epoch."""
        num_rounds = len(self._rounds.sizes)
        if self._rank is not None or not num_rounds:
            return num_rounds
        ranks, size = self._rounds.num_ranks, self._rounds.batch_size or 0
        in_last = min(ranks, -(-int(self._rounds.sizes[-1]) // size)) if self._rounds.packs_last else ranks
        return (num_rounds - 1) * ranks + in_last

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches of the epoch, each a list of indices; after load_state_dict(), those left."""
        start = self._position if self._is_resuming else 0
        self._position, self._is_resuming = start, False
        epoch = self._epoch
        made = epoch_of(self._lengths, self._rounds, seed=self._seed, epoch=epoch)
        step, first = (1, 0) if self._rank is None else (self._rounds.num_ranks, self._rank)
        for position in range(start, len(self)):
            self._position = position + 1
            yield made.batch(position * step + first)
        if self._epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be of this epoch, from its beginning.

        Not so after load_state_dict(): what is left of the loaded epoch comes first, and no earlier epoch
        after it. accelerate's DataLoader counts from 0 in each process, and tells it before each iteration.
        """
        if self._is_resuming or (self._was_loaded and epoch < self._epoch):
            return
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0

    def state_dict(self, *, epoch: int | None = None, position: int | None = None) -> dict[str, int]:
        """Return what load_state_dict() needs to go on in the middle of an epoch.

        Args:
            epoch: the epoch that is being trained; None takes that of the batch that was read last.
            position: batches of it that were trained; those of all ranks where there is no `rank`: the loop's
                own count times the ranks. None takes all that were read, which is more than were trained
                where a DataLoader has workers, and always where accelerate prepared it: both read ahead.
        """
        return {
            "seed": int(self._seed),
            "epoch": self._epoch if epoch is None else epoch,
            "position": self._position if position is None else position,
            "num_batches": len(self),
            "num_samples": len(self._lengths),
            "num_ranks": int(self._rounds.num_ranks),
            "lengths_crc32": crc32(self._lengths.tobytes()),
            "rounds_crc32": self._rounds.checksum,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a state was taken: the next iteration yields what was left of its epoch.

        Args:
            state: from state_dict().

        Raises:
            UserError: it is of other data, other batches, or another number of ranks, or it is no such state.
        """
        ours = self.state_dict()
        odd = next((name for name in ours if not is_whole(state.get(name), least=0)), None)
        per_step = self._rounds.num_ranks if self._rank is None else 1
        if odd is not None:
            told = f"{odd}={state[odd]!r} in the state" if odd in state else f"no {odd} in the state"
        elif any(state[name] != ours[name] for name in _OF_THE_BATCHES):
            told = _difference(state, ours)
        elif state["position"] > len(self):
            told = f"position={state['position']} in the state, {len(self)} batches here"
        elif state["position"] % per_step and state["position"] < len(self):
            told = (
                f"position={state['position']} in the state, {per_step} batches in a step of all ranks here"
            )
        else:
            self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
            self._is_resuming = self._was_loaded = True
            if self._position >= len(self):
                self._epoch, self._position, self._is_resuming = self._epoch + 1, 0, False
            return
        raise UserError(
            "batches-differ",
            "the state is of other batches than these",
            found=told,
            why="the same samples must come in the same batches, for each to come once in the epoch",
            fix="resume with the same data, batch size and number of ranks, or begin with a new epoch",
        )


_OF_THE_BATCHES = ("num_batches", "num_samples", "num_ranks", "lengths_crc32", "rounds_crc32")
"""What a state has in common with all others of the same batches."""


def _difference(theirs: Mapping[str, int], ours: Mapping[str, int]) -> str:
    """Return in words what of a state is not as it is here."""
    words = [
        f"{one['num_batches']} batches of {one['num_samples']} samples on {one['num_ranks']} "
        f"rank{'' if one['num_ranks'] == 1 else 's'}"
        for one in (theirs, ours)
    ]
    if words[0] != words[1]:
        return f"{words[0]} in the state, {words[1]} here"
    if theirs["lengths_crc32"] != ours["lengths_crc32"]:
        return f"{words[0]} in the state and here, but the samples have other lengths"
    return f"{words[0]} in the state and here, but they are cut in another way"


def _check(num_ranks: Any, rank: Any, seed: Any, *, by_tokens: bool, drops: bool, packs: bool) -> None:
    """Refuse arguments that contradict each other."""
    if not is_whole(num_ranks, least=1):
        found, fix = f"num_ranks={num_ranks!r}", "give a whole number of 1 or more"
    elif not is_whole(seed, least=0):
        found, fix = f"seed={seed!r}", "give a whole number of 0 or more, the same on every rank"
    elif rank is not None and not (is_whole(rank, least=0) and rank < num_ranks):
        found, fix = f"rank={rank!r} of {num_ranks} ranks", f"give 0 to {num_ranks - 1}, or None for all"
    elif rank is not None and packs:
        found = f"pack_last with rank={rank}"
        fix = "leave the rank out: the last ranks would have no batch in the last round"
    elif by_tokens and (drops or packs):
        found = "drop_last or pack_last with max_tokens"
        fix = "leave it out: batches of so many tokens differ in size anyway"
    else:
        return
    raise batches_undefined(found, fix=fix)
