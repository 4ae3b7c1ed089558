"""Batches of samples of like length for training, right under many ranks and resumable within an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.data.bucketing import as_lengths, epoch_of, rounds_of_samples, rounds_of_tokens
from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class LengthGroupedBatches:
    """A batch sampler: `DataLoader(dataset, batch_sampler=LengthGroupedBatches(lengths, batch_size=32))`.

    Every sample comes exactly once in an epoch, every rank has the same number of batches, and none is empty.
    Where a rank would be without a sample in the last round, and no round has one to give (batches of one
    sample, or fewer samples than ranks), as few samples as needed come twice. All of it follows from the
    lengths, the seed and the epoch: ranks need not talk to each other.

    Without `rank` it yields the batches of all ranks, in turn: what `accelerator.prepare()` counts on, which
    then takes each rank's own. With `rank` it yields those of one rank alone, for loops without accelerate;
    accelerate would deal these out again.

    The epoch goes up by itself when all of its batches were read; `set_epoch()` sets it.

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
        _check(batch_size, max_tokens, num_ranks, rank, drop_last=drop_last, pack_last=pack_last)
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
        self.drop_last = drop_last
        self.batch_size = self._rounds.batch_size if num_ranks == 1 or drop_last or pack_last else None
        """Samples of each batch but the last one; None where other batches may differ too. accelerate fills
        batches up to it, and takes them as they are where it is None (accelerate/data_loader.py,
        BatchSamplerShard)."""

    @property
    def sampler(self) -> LengthGroupedBatches:
        """What accelerate tells the epoch: it looks for `batch_sampler.sampler` (accelerate/data_loader.py,
        DataLoaderShard.set_epoch)."""
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
        """Let the next iteration be of this epoch; from its beginning, unless a state of it was loaded."""
        if epoch != self._epoch:
            self._epoch, self._position, self._is_resuming = epoch, 0, False

    def state_dict(self, *, epoch: int | None = None, position: int | None = None) -> dict[str, int]:
        """Return what load_state_dict() needs to go on in the middle of an epoch.

        Args:
            epoch: the epoch that is being trained; None takes that of the batch that was read last.
            position: batches of it that were trained; None takes all that were read. A DataLoader with
                workers reads ahead: give it the loop's own count.
        """
        return {
            "seed": self._seed,
            "epoch": self._epoch if epoch is None else epoch,
            "position": self._position if position is None else position,
            "num_batches": len(self),
            "num_samples": len(self._lengths),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where a state was taken: the next iteration yields what was left of its epoch.

        Args:
            state: from state_dict().

        Raises:
            UserError: it is of other data, other batches, or another number of ranks.
        """
        ours, theirs = (_words(one) for one in (self.state_dict(), state))
        if ours != theirs:
            raise UserError(
                "batches-differ",
                "the state is of other batches than these",
                found=f"{theirs} in the state, {ours} here",
                why="the same samples must come in the same batches, for each to come once in the epoch",
                fix="resume with the same data, batch size and number of ranks, or begin with a new epoch",
            )
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]
        self._is_resuming = True
        if self._position >= len(self):
            self.set_epoch(self._epoch + 1)


def _words(state: Mapping[str, int]) -> str:
    return f"{state['num_batches']} batches of {state['num_samples']} samples"


def _check(
    batch_size: int | None,
    max_tokens: int | None,
    num_ranks: int,
    rank: int | None,
    *,
    drop_last: bool,
    pack_last: bool,
) -> None:
    if batch_size is None and max_tokens is None:
        found, fix = "neither batch_size nor max_tokens", "give one of them"
    elif min(1 if one is None else one for one in (batch_size, max_tokens, num_ranks)) < 1:
        found = f"batch_size={batch_size}, max_tokens={max_tokens}, num_ranks={num_ranks}"
        fix = "give numbers of 1 or more"
    elif rank is not None and not 0 <= rank < num_ranks:
        found, fix = f"rank={rank} of {num_ranks} ranks", f"give 0 to {num_ranks - 1}, or None for all"
    elif rank is not None and pack_last:
        found = f"pack_last with rank={rank}"
        fix = "leave the rank out: the last ranks would have no batch in the last round"
    elif max_tokens is not None and (drop_last or pack_last):
        found = "drop_last or pack_last with max_tokens"
        fix = "leave it out: batches of so many tokens differ in size anyway"
    else:
        return
    raise UserError(
        "batches-undefined",
        "these arguments say of no batch what it holds",
        found=found,
        why="a batch holds a number of samples, or samples of a number of tokens, of one rank or of all",
        fix=fix,
    )
