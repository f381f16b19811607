"""Batches as a pure function of (seed, epoch, batch), so that resuming needs two integers."""

import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trainingcxl.data.dataset import Dataset, Rows, select
from trainingcxl.data.elementary import mix_scalar
from trainingcxl.data.permutation import Permutation

if TYPE_CHECKING:
    from torch import Tensor

    from trainingcxl.nn import SparseFeatures

__all__ = ["Batch", "BatchLoader"]


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of B samples.

    Attributes:
        dense: float32, shape (B, number of dense columns).
        sparse: The ids of every feature.
        label: float32, shape (B,).
    """

    dense: "Tensor"
    sparse: "SparseFeatures"
    label: "Tensor"


class BatchLoader:
    """Reads a data set in batches, shuffled anew each epoch, ahead of the training loop.

    The samples of a batch depend only on (seed, epoch, batch, batch size, sample range): not on
    what was read before, not on any global random generator, not on `prefetch`. The loader has a
    position, the next batch to hand out. Iterating runs from the position to the end of its epoch;
    iterating again after a `break` goes on where it stopped, and `seek` moves the position.

    Example:
        >>> from trainingcxl.data import BatchLoader, open_data
        >>> loader = BatchLoader(open_data("synthetic:tiny"), 128, seed=0)
        >>> loader.seek(epoch=2, batch=17)
        >>> batch = next(iter(loader))
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        start: int = 0,
        stop: int | None = None,
        fields: Sequence[str] | None = None,
        prefetch: int = 2,
    ) -> None:
        """Choose what to read.

        Args:
            dataset: Where samples come from.
            batch_size: Samples of a batch, B; the last batch of an epoch may be shorter.
            seed: Decides the order, together with the epoch.
            shuffle: False reads in the order of the data set.
            drop_last: Leave out a last batch of fewer than `batch_size` samples.
            start: First sample of the range to read.
            stop: End of the range, exclusive; None is the end of the data set.
            fields: Features to hand out, in this order; None is all.
            prefetch: Batches prepared ahead by a background thread; 0 prepares them when asked for.

        Raises:
            ValueError: The range holds no batch, or a feature is unknown.
        """
        stop = dataset.num_samples if stop is None else stop
        if not 0 <= start <= stop <= dataset.num_samples:
            raise ValueError(f"samples [{start}, {stop}) asked for, data has {dataset.num_samples}")
        if batch_size < 1 or prefetch < 0:
            raise ValueError(f"batch_size {batch_size} must be >= 1, prefetch {prefetch} >= 0")
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.shuffle, self.drop_last, self.prefetch = shuffle, drop_last, prefetch
        self.start, self.stop = start, stop
        self.features = select(dataset.features, fields)
        single = [f.name for f in dataset.features if not f.is_jagged]
        self._columns = [single.index(f.name) for f in self.features if not f.is_jagged]
        self._takes_all_columns = self._columns == list(range(len(single)))
        count = stop - start
        self._num_batches = count // batch_size if drop_last else -(-count // batch_size)
        if self._num_batches == 0:
            raise ValueError(
                f"samples [{start}, {stop}) hold no batch of {batch_size}\n"
                "  do:    use a smaller batch size, or drop_last=False"
            )
        self._epoch, self._batch = 0, 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self._num_batches

    @property
    def feature_names(self) -> list[str]:
        """Names of the features handed out, in order."""
        return [feature.name for feature in self.features]

    def seek(self, epoch: int, batch: int = 0) -> None:
        """Move the position: the next iteration starts with `batch` of `epoch`.

        Args:
            epoch: Number of the epoch, from 0; any number is valid, epochs do not end.
            batch: Batches of that epoch to leave out. `len(loader)` makes the next iteration empty
                and the one after it start the following epoch.

        Raises:
            ValueError: The position does not exist.
        """
        if epoch < 0 or not 0 <= batch <= self._num_batches:
            raise ValueError(
                f"no batch {batch} of epoch {epoch}: an epoch has {self._num_batches} batches"
            )
        self._epoch, self._batch = epoch, batch

    def state_dict(self) -> dict[str, int]:
        """Return {"epoch", "batch"} of the next batch; batches prepared ahead don't count."""
        if self._batch == self._num_batches:
            return {"epoch": self._epoch + 1, "batch": 0}
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position returned by `state_dict`.

        Raises:
            ValueError: The state has other keys, or a position that this loader doesn't have.
        """
        if set(state) != {"epoch", "batch"}:
            raise ValueError(f"loader state has keys {sorted(state)}, expected epoch and batch")
        self.seek(int(state["epoch"]), int(state["batch"]))

    def samples(self, epoch: int, batch: int) -> NDArray[np.int64]:
        """Return the sample numbers of a batch, int64, shape (B,)."""
        count = self.stop - self.start
        first = batch * self.batch_size
        position = np.arange(first, min(first + self.batch_size, count), dtype=np.int64)
        if self.shuffle:
            key = mix_scalar(mix_scalar(self.seed) + epoch)
            position = Permutation(count, key)(position)
        return position + self.start

    def batch(self, epoch: int, batch: int) -> Batch:
        """Return one batch without moving the position."""
        return self._assemble(self.dataset.read(self.samples(epoch, batch)))

    def _assemble(self, rows: Rows) -> Batch:
        import torch

        from trainingcxl.nn import SparseFeatures

        names = self.feature_names
        ids = rows.ids if self._takes_all_columns else rows.ids[:, self._columns]
        if not rows.jagged or not any(feature.is_jagged for feature in self.features):
            sparse = SparseFeatures.from_dense(names, torch.from_numpy(ids))
        else:
            values, lengths, column = [], [], 0
            ones = np.ones(rows.label.size, dtype=np.int64)
            for feature in self.features:
                if feature.is_jagged:
                    values.append(rows.jagged[feature.name].values)
                    lengths.append(rows.jagged[feature.name].lengths)
                else:
                    values.append(ids[:, column])
                    lengths.append(ones)
                    column += 1
            sparse = SparseFeatures(
                names,
                torch.from_numpy(np.concatenate(values)),
                lengths=torch.from_numpy(np.concatenate(lengths)),
            )
        return Batch(torch.from_numpy(rows.dense), sparse, torch.from_numpy(rows.label))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate from the position to the end of its epoch."""
        epoch, first = self._epoch, self._batch
        source = self._ahead(epoch, first) if self.prefetch else self._direct(epoch, first)
        try:
            for number, batch in enumerate(source, start=first):
                self._epoch, self._batch = epoch, number + 1
                yield batch
            self._epoch, self._batch = epoch + 1, 0
        finally:
            source.close()

    def _direct(self, epoch: int, first: int) -> "_Batches":
        for number in range(first, self._num_batches):
            yield self.batch(epoch, number)

    def _ahead(self, epoch: int, first: int) -> "_Batches":
        """Yield the batches in order, prepared by a thread that stays at most `prefetch` ahead."""
        ready: queue.Queue[Batch | BaseException | None] = queue.Queue(self.prefetch)
        stopped = threading.Event()

        def produce() -> None:
            try:
                for batch in self._direct(epoch, first):
                    ready.put(batch)
                    if stopped.is_set():
                        return
                ready.put(None)
            except BaseException as error:  # handed to the consumer, whatever it is
                ready.put(error)

        producer = threading.Thread(target=produce, name="trainingcxl-loader", daemon=True)
        producer.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stopped.set()
            while producer.is_alive():
                # The producer may be waiting for room in the queue.
                while not ready.empty():
                    ready.get_nowait()
                producer.join(0.005)


if TYPE_CHECKING:
    from collections.abc import Generator

    _Batches = Generator[Batch, None, None]
