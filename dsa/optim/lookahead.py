"""`opt.lookahead(loader, ...)`: batches leave a loader some steps ahead of their use, and their rows are announced.

No number may depend on how far ahead. So whatever fetching draws at random comes from a stream of its own: it is
derived once per iteration from torch's global generator and swapped in around every fetch, and training goes on
drawing from the global generators as if fetching drew nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from dsa.errors import ConfigError
from dsa.optim.collating import BatchWithRows, gives_rows
from dsa.optim.random_stream import RandomStream
from dsa.optim.row_sets import Key, Rows

Batch = TypeVar("Batch")
MOST_AHEAD = 64
_FIRST_AHEAD = 4
_NEEDS_ROWS = (
    "lookahead needs rows=fn, where fn(batch) returns a dict such as {model.node_emb: ids}, or a loader whose collate "
    "function was wrapped by collate_with_rows; where rows are only known inside the model, use watch(model) instead"
)


class Announcer(Protocol):
    """What takes announcements of batches to come and knows them by tickets."""

    def announce_ahead(self, rows: Mapping[Key, Rows], hand_out: int | None = None) -> int:
        """Note the rows of a batch that was fetched but not yet given to the loop; returns its ticket, never blocks.

        `hand_out`: the ticket of another one that is, once this one is noted: two calls in one.
        """

    def hand_out(self, ticket: int) -> None:
        """The batch is about to be given to the loop's body: the first step from now on ends it."""

    def end(self, ticket: int) -> None:
        """End the batch without a step; does nothing for one that has ended.

        Rows of a batch that was handed out still count as announced until the next step. Never raises. May come out
        of a garbage collection, in any thread and at any instruction, even while the same thread is inside the
        announcer: it must not wait for a lock that the interrupted code may hold.
        """


class Lookahead(Generic[Batch]):
    """The batches of `loader`, the same ones in the same order, each announced `depth` batches before its turn.

    Can be iterated again and again. `len()`, and every attribute that is not its own, are the loader's. `state_dict()`,
    where the loader has it, is the loader's as of the batch last given to the loop, not of the one last fetched. An
    error of the loader or of `rows` is raised when its batch's turn comes, at every depth alike.

    Args:
        loader: any iterable of batches.
        rows: the rows of a batch, `rows(batch)` -> {module, parameter or name: rows}; None where the loader's batches
            come from `collate_with_rows`.
        announcer: receives the announcements.
        depth: batches fetched ahead of the one that the loop is working on; None: grows by one a batch to
            MOST_AHEAD, for the further the rows are known, the better the cache keeps what will be used (how many of
            the batches are brought into frames is the engine's to size).

    Raises:
        ConfigError: `rows` is no function or `depth` neither None nor a whole number of at least 0.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        rows: Callable[[Batch], Mapping[Key, Rows]] | None,
        announcer: Announcer,
        depth: int | None = 4,
    ) -> None:
        if not callable(rows) and not (rows is None and gives_rows(loader)):
            raise ConfigError(f"{_NEEDS_ROWS}; got rows={rows!r}")
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
            raise ConfigError(f"lookahead's depth must be None or a whole number of batches, at least 0, got {depth!r}")
        self._loader = loader
        self._rows = rows
        self._announcer = announcer
        self._depth = depth
        self._state_at_last: tuple[Any] | None = None

    def __iter__(self) -> Generator[Batch, None, None]:
        # Drawn here, not at the first batch, and by every depth alike: training's own stream moves on by one draw.
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())
        return self._batches(RandomStream(seed))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # Reached only for what is not found here. A copy or unpickling asks before `_loader` is set.
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        found = getattr(self._loader, name)
        if name == "state_dict":
            return self._state_dict
        if name == "load_state_dict":
            return self._load_state_dict
        return found

    def _state_dict(self) -> Any:
        return self._loader_state() if self._state_at_last is None else self._state_at_last[0]

    def _load_state_dict(self, state: Any) -> Any:
        self._state_at_last = None
        return self._loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _loader_state(self) -> Any:
        state_dict = getattr(self._loader, "state_dict", None)
        return None if state_dict is None else state_dict()

    def _batches(self, stream: RandomStream) -> Generator[Batch, None, None]:
        ahead: deque[_Fetched[Batch]] = deque()
        handed_out: deque[int] = deque()
        failure: Exception | None = None
        more = True
        depth = _FIRST_AHEAD if self._depth is None else self._depth
        try:
            with stream:
                batches = iter(self._loader)
            while True:
                handed: int | None = None
                while more and len(ahead) <= depth:
                    first = ahead[0].ticket if 0 < depth == len(ahead) else None  # the last one to be fetched now
                    try:
                        following = self._fetch(batches, stream, first)
                    except Exception as error:
                        failure, more = error, False
                    else:
                        if following is None:
                            more = False
                        else:
                            ahead.append(following)
                            handed = first
                        del following
                if not ahead:
                    break
                fetched = ahead.popleft()
                handed_out.append(fetched.ticket)
                if fetched.ticket != handed:
                    self._announcer.hand_out(fetched.ticket)
                # A step has ended those before it; of a loop that does not step, only the latest stay.
                while len(handed_out) > max(depth, 1):
                    self._announcer.end(handed_out.popleft())
                self._state_at_last = (fetched.state,)
                if self._depth is None:
                    depth = min(depth + 1, MOST_AHEAD)
                batch = fetched.batch
                del fetched
                yield batch
                del batch
            self._state_at_last = None
            if failure is not None:
                raise failure
        finally:
            failure = None  # its traceback holds this frame: a cycle, were it kept
            for ticket in [*handed_out, *(waiting.ticket for waiting in ahead)]:
                self._announcer.end(ticket)

    def _fetch(self, batches: Iterator[Batch], stream: RandomStream, hand_out: int | None) -> _Fetched[Batch] | None:
        """The next batch, announced, and another one handed out; None, and nothing, at the loader's end."""
        with stream:
            try:
                batch = next(batches)
            except StopIteration:
                return None
            state = self._loader_state()
            rows: Mapping[Any, Any]
            if isinstance(batch, BatchWithRows):
                rows, batch = batch.rows, batch.batch
            if self._rows is not None:
                rows = self._rows(batch)
        return _Fetched(batch, state, self._announcer.announce_ahead(rows, hand_out))


@dataclass(frozen=True)
class _Fetched(Generic[Batch]):
    """A batch that waits for its turn, the loader's state right after it was fetched, and its ticket."""

    batch: Batch
    state: Any
    ticket: int
