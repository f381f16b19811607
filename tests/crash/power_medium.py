"""What a medium may hold when the power fails at one moment of a record.

Bytes reach the medium by granules, lines of 64 bytes on DAX: a granule's stores since it was last
surely durable are kept as steps, one for each time that it was seen to change. Which of them had
reached the medium is open:

- "weak": each 8-byte word has any of its values, whatever its neighbours have;
- "tso": stores to one granule arrive in their order, so it holds the first steps as a whole and of
  the next one some words, whose order is not known.
"""

import copy
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

__all__ = [
    "FENCE", "FLUSH", "FOLDER", "MARK", "PAGE_WORDS", "POINT", "STORE", "SYNC_END", "FileState",
    "Granule", "Image", "Kinds", "Medium", "Patch", "Step", "chosen_steps", "copy_of",
]  # fmt: skip

PAGE_WORDS = 512
STORE, FLUSH, FENCE, SIZE, SYNC_BEGIN, SYNC_END, FOLDER, POINT, MARK = range(9)
Granule = tuple[int, int]  # file, number in the file
Step = tuple[int, np.ndarray, np.ndarray]  # number, words, values
Patch = list[tuple[int, np.ndarray, np.ndarray]]  # file, words, values


@dataclass
class FileState:
    """A file as it surely is on the medium, and as the process sees it."""

    durable: np.ndarray
    memory: np.ndarray
    size: int
    """As the process sees it; -1: not there."""
    durable_sizes: list[int] = field(default_factory=list)
    """Sizes that it may have on the medium; the last is the present one."""
    is_entry_durable: bool = True
    pages: set[int] = field(default_factory=set)
    """Those that are not zero, and others: the files are large and nearly empty."""

    @classmethod
    def of(cls, words: np.ndarray, size: int, pages: set[int] | None = None) -> "FileState":
        """All of it durable; -1: not there."""
        if pages is None:
            pages = set((np.flatnonzero(words) // PAGE_WORDS).tolist())
        memory = copy_of(words, pages)
        return cls(words, memory, size, [max(size, -1)], size >= 0, set(pages))

    def copy(self) -> "FileState":
        return replace(
            self,
            durable=copy_of(self.durable, self.pages),
            memory=copy_of(self.memory, self.pages),
            durable_sizes=list(self.durable_sizes),
            pages=set(self.pages),
        )

    def resize(self, size: int) -> None:
        """What is cut off reads as zero, should the file grow again."""
        words = max(0, size + 7) // 8
        self.durable = _resized(self.durable, words)
        self.memory = _resized(self.memory, words)
        self.size = size
        self.durable_sizes.append(size)


@dataclass(frozen=True)
class Image:
    """One state of the medium: what differs from the durable state."""

    patch: Patch
    sizes: tuple[int, ...]
    """Per file; -1: the file is not there."""
    key: int
    """Equal for equal contents."""
    alone: str = ""
    """The kind of bytes of which all have arrived, and nothing else."""


class Medium:
    """Follows a record; makes images of the moment that it has come to."""

    def __init__(self, contents: list[bytes | None], granule_words: int = 8) -> None:
        self.granule_words = granule_words
        self.files = [
            FileState.of(
                np.frombuffer(_padded(content or b""), np.uint64).copy(),
                -1 if content is None else len(content),
            )
            for content in contents
        ]
        self.folder_is_durable = any(content is not None for content in contents)
        self.pending: dict[Granule, list[tuple[int, np.ndarray, np.ndarray]]] = {}
        self._flushed: dict[int, dict[Granule, int]] = {}
        self._step = 0
        self._synced: dict[tuple[int, int], tuple[int, int, int, int]] = {}
        self._moved: Patch = []
        self.key = self._key()
        self.changed: set[tuple[int, int]] = set()
        """Pages of `durable` that changed since this was last emptied."""

    def copy(self) -> "Medium":
        """Goes on by itself."""
        other = copy.copy(self)
        other.files = [file.copy() for file in self.files]
        other.pending = {key: list(steps) for key, steps in self.pending.items()}
        other._flushed = {thread: dict(keys) for thread, keys in self._flushed.items()}
        other._synced = dict(self._synced)
        other.changed, other._moved = set(), []
        return other

    def after(self, image: "Image") -> "Medium":
        """One that holds the image, durable, in files that no process has open."""
        other = copy.copy(self)
        other.files, other.pending, other._flushed, other._synced = [], {}, {}, {}
        other.changed, other._moved = set(), []
        for number, (file, size) in enumerate(zip(self.files, image.sizes, strict=True)):
            words = copy_of(file.durable, file.pages)
            pages = set(file.pages)
            for where, places, values in image.patch:
                if where == number:
                    words[places] = values
                    pages.update((places // PAGE_WORDS).tolist())
            words = _resized(words, (size + 7) // 8)
            other.files.append(FileState.of(words, size, pages))
        other.folder_is_durable = any(size >= 0 for size in image.sizes)
        other.key = other._key()
        return other

    def _key(self) -> int:
        key = 0
        for number, file in enumerate(self.files):
            places = np.concatenate(
                [np.arange(p * PAGE_WORDS, (p + 1) * PAGE_WORDS) for p in file.pages]
                or [np.zeros(0, np.int64)]
            )
            places = places[places < file.durable.size]
            key ^= _mix(number, places, file.durable[places])
        return key

    # --- following the record

    def store(self, number: int, places: np.ndarray, values: np.ndarray) -> None:
        file = self.files[number]
        file.memory[places] = values
        file.pages.update((places // PAGE_WORDS).tolist())
        self._step += 1
        granules = places // self.granule_words
        bounds = [0, *(np.flatnonzero(np.diff(granules)) + 1), len(places)]
        for begin, end in itertools.pairwise(bounds):
            steps = self.pending.setdefault((number, int(granules[begin])), [])
            steps.append((self._step, places[begin:end], values[begin:end]))

    def flush(self, thread: int, number: int, offset: int, num_bytes: int) -> None:
        granule_bytes = 8 * self.granule_words
        begin, end = offset // granule_bytes, -(-(offset + num_bytes) // granule_bytes)
        flushed = self._flushed.setdefault(thread, {})
        if end - begin > len(self.pending):
            keys = [key for key in self.pending if key[0] == number and begin <= key[1] < end]
        else:
            keys = [(number, g) for g in range(begin, end) if (number, g) in self.pending]
        flushed.update(dict.fromkeys(keys, self._step))

    def fence(self, thread: int) -> None:
        for key, step in self._flushed.pop(thread, {}).items():
            self._retire(key, step)
        self._mix_moved()

    def forget_flushes(self) -> None:
        """The threads are gone that could have fenced what they flushed."""
        self._flushed.clear()

    def sync_begin(self, thread: int, number: int, offset: int, num_bytes: int) -> None:
        """Of a range; of the whole file and its size if `num_bytes` is 0."""
        size = self.files[number].size
        self._synced[thread, number] = self._step, size, offset, num_bytes

    def sync_end(self, thread: int, number: int) -> None:
        step, size, offset, num_bytes = self._synced.pop((thread, number))
        granule_bytes = 8 * self.granule_words
        end = offset + num_bytes if num_bytes else 1 << 62
        for key in [key for key in self.pending if key[0] == number]:
            if offset <= key[1] * granule_bytes < end:
                self._retire(key, step)
        self._mix_moved()
        file = self.files[number]
        if num_bytes == 0 and size in file.durable_sizes:
            del file.durable_sizes[: file.durable_sizes.index(size)]

    def folder(self, is_pool: bool) -> None:
        if not is_pool:
            self.folder_is_durable = True
            return
        for file in self.files:
            file.is_entry_durable = file.size >= 0

    def resize(self, number: int, size: int) -> None:
        file = self.files[number]
        cut = max(0, size) // 8
        places = cut + np.flatnonzero(file.durable[cut:])
        self.key ^= _mix(number, places, file.durable[places])
        file.resize(size)
        self.pending = {
            key: steps
            for key, steps in self.pending.items()
            if key[0] != number or key[1] * self.granule_words * 8 < size
        }

    def would_change(self, thread: int) -> bool:
        """Whether a fence of this thread makes anything durable."""
        return bool(self._flushed.get(thread))

    def _retire(self, key: Granule, through: int) -> None:
        steps = self.pending.get(key, [])
        while steps and steps[0][0] <= through:
            _, places, values = steps.pop(0)
            file = self.files[key[0]]
            self._moved.append((key[0], places, file.durable[places]))
            self._moved.append((key[0], places, values))
            file.durable[places] = values
            self.changed.add((key[0], int(places[0]) // PAGE_WORDS))
        if not steps:
            self.pending.pop(key, None)

    def _mix_moved(self) -> None:
        self.key ^= _mix_all(self._moved)
        self._moved.clear()

    # --- images

    def everything(self) -> Image:
        """All stores have arrived."""
        return self._image(list(self.pending), "all", random.Random(0), are_sizes_new=True)

    def images(
        self, mode: str, count: int, choose: random.Random, kinds: "Kinds"
    ) -> Iterator[Image]:
        """About `count` images of this moment, the telling ones first."""
        keys = list(self.pending)
        yield self._image([], mode, choose, are_sizes_new=True)
        yield self.everything()
        if not self._is_settled():
            count *= 2
            for _ in range(6):
                yield self._image(self._subset(keys, choose) if keys else [], mode, choose)
        groups: dict[str, list[Granule]] = {}
        for key in keys:
            groups.setdefault(kinds.of(key[0], key[1] * self.granule_words * 8), []).append(key)
        made = 2
        for kind, group in groups.items():
            others = [key for k, other in groups.items() if k != kind for key in other]
            yield replace(self._image(group, "all", choose), alone=kind)
            rest = [other for other in groups if other != kind]
            alone = rest[0] if len(rest) == 1 else ""
            yield replace(self._image(others, "all", choose), alone=alone)
            made += 2
        while keys and made < count:
            how = choose.choice((mode, mode, "all"))
            yield self._image(self._subset(keys, choose), how, choose)
            made += 1

    def _is_settled(self) -> bool:
        """Sizes and entries of the files are durable."""
        return self.folder_is_durable and all(
            len(file.durable_sizes) == 1 and file.is_entry_durable for file in self.files
        )

    def _subset(self, keys: list[Granule], choose: random.Random) -> list[Granule]:
        if choose.random() < 0.3:  # one alone, or all but one
            one = choose.choice(keys)
            return [one] if choose.random() < 0.5 else [key for key in keys if key != one]
        share = choose.choice((0.1, 0.5, 0.9, 1.0))
        return [key for key in keys if choose.random() < share]

    def _image(
        self,
        arrived: list[Granule],
        mode: str,
        choose: random.Random,
        *,
        are_sizes_new: bool = False,
    ) -> Image:
        steps = [
            (key[0], places, values)
            for key in arrived
            for _, places, values in self._chosen(key, mode, choose)
        ]
        return self._made(steps, choose, are_sizes_new=are_sizes_new)

    def _chosen(self, key: Granule, mode: str, choose: random.Random) -> list[Step]:
        return chosen_steps(self.pending[key], mode, choose)

    def _made(self, steps: Patch, choose: random.Random, *, are_sizes_new: bool) -> Image:
        patch = _last_wins(steps)
        sizes = tuple(f.size for f in self.files) if are_sizes_new else self._sizes(choose)
        key = self.key ^ hash(sizes)
        for number, places, values in patch:
            old = self.files[number].durable[places]
            key ^= _mix(number, places, old) ^ _mix(number, places, values)
        return Image(patch, sizes, key)

    def _sizes(self, choose: random.Random) -> tuple[int, ...]:
        if not self.folder_is_durable and choose.random() < 0.3:
            return tuple(-1 for _ in self.files)
        return tuple(
            -1
            if not file.is_entry_durable and choose.random() < 0.3
            else choose.choice(file.durable_sizes)
            for file in self.files
        )


class Kinds:
    """What lies where in the files (docs/format.md)."""

    _HEAD = (
        (8192, "superblock"), (12288, "session"), (65536, "slot"), (262144, "resume"),
        (524288, "flag"), (3 << 20, "geometry"), (4 << 20, "rest"),
    )  # fmt: skip

    def __init__(self) -> None:
        self.rings: list[tuple[int, int]] = []
        self.dense_areas: set[int] = set()
        self._known: dict[tuple[int, int], str] = {}

    def learn(self, log: np.ndarray) -> None:
        """Where the undo ring and the dense areas lie now, and where they lay before."""
        for offset in (1 << 20, 2 << 20):
            if 8 * log.size > offset + 320 and int(log[offset // 8]):
                areas = set(log[offset // 8 + 8 : offset // 8 + 24].tolist())
                if not areas <= self.dense_areas:
                    self.dense_areas |= areas
                    self._known.clear()
                begin, count = int(log[offset // 8 + 5]), int(log[offset // 8 + 6])
                if count and (begin, begin + count) not in self.rings:
                    self.rings.append((begin, begin + count))
                    self._known.clear()

    def of(self, number: int, offset: int) -> str:
        known = self._known.get((number, offset))
        if known is None:
            known = self._known[number, offset] = self._look_up(number, offset)
        return known

    def _look_up(self, number: int, offset: int) -> str:
        if number == 1:
            return "rows"
        if number == 2:
            return "journal slot" if offset < 8192 else "journal frame"
        for end, kind in self._HEAD:
            if offset < end:
                return kind
        if any(begin <= offset < end for begin, end in self.rings):
            return "frame"
        return "dense header" if offset // 4096 * 4096 in self.dense_areas else "dense"


IN_FLIGHT = {"rows", "frame", "flag", "slot", "resume"}


def chosen_steps(steps: list[Step], mode: str, choose: random.Random) -> list[Step]:
    """Which of a granule's steps have arrived."""
    if mode == "all":
        return steps
    if mode == "tso":
        whole = choose.randint(0, len(steps))
        return steps[:whole] + [_some(step, choose) for step in steps[whole : whole + 1]]
    values: dict[int, list[int]] = {}
    for _, places, stored in steps:
        for place, value in zip(places.tolist(), stored.tolist(), strict=True):
            values.setdefault(place, []).append(value)
    taken = {}
    for place, versions in values.items():
        version = choose.randint(0, len(versions))
        if version:
            taken[place] = versions[version - 1]
    places = np.fromiter(taken.keys(), np.int64, len(taken))
    return [(0, places, np.fromiter(taken.values(), np.uint64, len(taken)))]


def _some(step: Step, choose: random.Random) -> Step:
    number, places, values = step
    bits = choose.getrandbits(len(places))
    kept = np.array([bits >> i & 1 for i in range(len(places))], bool)
    return number, places[kept], values[kept]


def _last_wins(patch: Patch) -> Patch:
    """Each word once."""
    out: Patch = []
    for number in {entry[0] for entry in patch}:
        places = np.concatenate([entry[1] for entry in patch if entry[0] == number])[::-1]
        values = np.concatenate([entry[2] for entry in patch if entry[0] == number])[::-1]
        unique, first = np.unique(places, return_index=True)
        out.append((number, unique, values[first]))
    return out


def _mix(number: int, places: np.ndarray, values: np.ndarray) -> int:
    """A hash of a set of words: XOR of one for each that is not zero."""
    with np.errstate(over="ignore"):
        h = places.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(number)
        h = (h ^ (h >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) + values
        h = (h ^ (h >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        h ^= h >> np.uint64(31)
    return int(np.bitwise_xor.reduce(h[values != 0], initial=np.uint64(0)))


def _mix_all(patch: Patch) -> int:
    key = 0
    for number in {entry[0] for entry in patch}:
        places = np.concatenate([entry[1] for entry in patch if entry[0] == number])
        values = np.concatenate([entry[2] for entry in patch if entry[0] == number])
        key ^= _mix(number, places, values)
    return key


def _resized(words: np.ndarray, count: int) -> np.ndarray:
    if words.size == count:
        return words
    more = np.zeros(max(0, count - words.size), np.uint64)
    return np.concatenate([words[:count], more])


def copy_of(words: np.ndarray, pages: set[int]) -> np.ndarray:
    """Of which all that is not zero lies in `pages`."""
    out = np.zeros(words.size, np.uint64)
    whole = words.size // PAGE_WORDS
    numbers = np.fromiter(pages, np.int64, len(pages))
    numbers = numbers[numbers < whole]
    end = whole * PAGE_WORDS
    out[:end].reshape(-1, PAGE_WORDS)[numbers] = words[:end].reshape(-1, PAGE_WORDS)[numbers]
    out[end:] = words[end:]
    return out


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 8)
