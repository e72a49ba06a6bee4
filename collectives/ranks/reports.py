"""What kernels and the host tell each other beside the stream: waits that failed, peers that ended.

Pages of the host's memory, which a GPU reaches over a slow link, have a line for each buffer:

    word          written by   holds
    REPORTED      kernels      0, or STATUS of the pad
    GONE_WORD     the host     0, or waiter << 32 | peer + 1: the process of `peer` has ended, or
                               ranks make different calls
    ALARM_WORD    the host     address of the page's first word: 1 once one of its lines has news

Kernels write there only when a wait has failed, and read there only while they wait. So a call
costs neither a copy nor a synchronization, captured in a graph or not, and any call of the process
can look at the first words, in 0.1 us, whatever memory the failure was on.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Mapping

import torch

from weft.collectives.ranks import pad
from weft.collectives.ranks.group import here
from weft.collectives.ranks.waits import Alive

REPORTED, GONE_WORD, ALARM_WORD = 0, 1, 2
_LINE = 8  # words
_LINES = 63  # of a page, beside that of the alarm
_LOOK_S = 0.25
_END_S = 10.0

_logger = logging.getLogger("weft")


class _Page:
    def __init__(self, pinned: bool) -> None:
        # With an explicit device, as the caller's default device may be the GPU.
        size = (_LINES + 1) * _LINE
        self._words = torch.zeros(size, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.words = self._words.numpy()  # the same memory, read by every call
        self.address = self._words.data_ptr()
        self.pinned, self.free = pinned, list(range(_LINES, 0, -1))


_pages: list[_Page] = []  # for good: a kernel may still write there
_reports: list[Report] = []  # of open buffers
_untold: list[tuple[object, Exception]] = []  # of buffers closed since: of which virtual rank, what


class Report:
    """The line of one buffer.

    Attributes:
        address: of the line, for REPORT of the pad.
        rank: of this process in the buffer's group.
        world: that of the virtual rank whose buffer it is; else None.
        op: the last call on the buffer, which errors name.
        compare: tells how calls of the ranks differ, of which kernels are told while they wait.
    """

    compare: Callable[[], str] | None = None

    def __init__(
        self,
        rank: int,
        peers: Mapping[int, Alive],
        on_gpu: bool,
        told: Callable[[int, int, str], Exception],
    ) -> None:
        """
        Args:
            peers: the processes of the other ranks; empty if they are threads of this one.
            told: makes the error that a STATUS tells of, for (status, rank, op).
        """
        page = next((page for page in _pages if page.free and page.pinned == on_gpu), None)
        if page is None:
            page = _Page(on_gpu)
            _pages.append(page)
        self.rank, self.op, self.world = rank, "a call", here.world
        self._told, self._peers = told, peers
        self._page, self._line = page, page.free.pop()
        self._at = self._line * _LINE
        self._logged = self._watched = self._raised = False
        self._gone: set[int] = set()  # peers whose processes had ended at the last look
        self.address = page.address + 8 * self._at
        page.words[self._at : self._at + _LINE] = 0
        page.words[self._at + ALARM_WORD] = page.address
        _reports.append(self)

    def watch(self) -> None:
        """From now on, end waits for peers whose processes have ended."""
        if not self._watched:
            self._watched = True
            if self._peers:
                _Watch.begin()

    def look(self) -> None:
        """Tell kernels of ended processes, and the log of failures. Called by another thread."""
        if not self._watched:
            return
        # A process may end right after its part of the last call: what is on its way from other
        # ranks has until the next look.
        before, self._gone = self._gone, {p for p, each in self._peers.items() if not each.alive()}
        ended = before & self._gone
        if not ended and self._peers and self.compare and self.compare():
            ended = set(self._peers)  # to end waits; the error tells what it is
        if ended and not self._page.words[self._at + GONE_WORD]:
            self._page.words[self._at + GONE_WORD] = self.rank << 32 | min(ended) + 1
        if not self._logged and (error := self.error()):
            self._logged = True
            _logger.error("%s", error)

    def error(self) -> Exception | None:
        """What a kernel has told of."""
        word = int(self._page.words[self._at + REPORTED])
        if not word:
            return None
        code, waiter, _, generation = pad.status_in(word)
        gone = int(self._page.words[self._at + GONE_WORD])
        if code == pad.TIMED_OUT and waiter == self.rank and gone:  # the wait was cut short
            word = pad.status_word(pad.GONE, waiter, (gone & 0xFFFFFFFF) - 1, generation)
        return self._told(word, self.rank, self.op)

    def check(self) -> None:
        """Raise what a kernel has told of."""
        if self._page.words[self._at + REPORTED] and (error := self.error()):
            self._raised = True
            raise error

    def close(self) -> None:
        """Give the line back: the memory is not used any more. What nobody was told is kept."""
        if self in _reports:
            _reports.remove(self)
            if self._page.pinned and not self._raised and (error := self.error()):
                _untold.append((self.world, error))
            self._page.words[self._at + REPORTED] = 0
            self._page.free.append(self._line)
            if not any(each.error() for each in _reports if each._page is self._page):
                self._page.words[0] = 0


def check_all() -> None:
    """Raise what a kernel of this rank has told of on a GPU, on whatever buffer.

    Every call begins so, even one that reaches no peer: what it works on may be the result of one
    that failed. It takes 0.1 us.
    """
    for entry in _untold:
        if entry[0] is here.world:
            _untold.remove(entry)
            raise entry[1]
    for page in _pages:
        if page.pinned and page.words[0]:  # calls on a CPU have raised themselves
            for report in list(_reports):
                if report._page is page and report.world is here.world:
                    report.check()


def forget() -> None:
    """What was not told is of no interest any more: all buffers of the process are closed."""
    _untold.clear()


def watch_all() -> None:
    """`Report.watch` for every buffer: an interpreted kernel waits."""
    for report in list(_reports):
        report.watch()


class _Watch(threading.Thread):
    """Looks at the processes of all peers four times a second."""

    _running: _Watch | None = None
    _end = threading.Event()

    @classmethod
    def begin(cls) -> None:
        if cls._running is None or not cls._running.is_alive():
            cls._running = cls(name="weft peers", daemon=True)
            cls._running.start()

    @classmethod
    def end(cls) -> None:
        cls._end.set()
        if cls._running is not None:
            cls._running.join(_END_S)

    def run(self) -> None:
        while not self._end.wait(_LOOK_S):
            for report in list(_reports):
                try:
                    report.look()
                except OSError as error:  # say that no file can be opened now: it looks again
                    _logger.debug("looking at the processes of peers: %s", error)


# Waited for: a thread that is still at work when Python goes is stopped wherever it is, which in
# the middle of torch's code aborts the process.
atexit.register(_Watch.end)
