"""The process of a device, or of a site with many: each client asks the server for letters, and answers them.

A client's loop has no end: whatever goes wrong is told to its owner, and tried again after pauses that grow. So a
server that is away, busy or somebody else for a while costs that while. Between two letters the server is asked the
more seldom, the longer there was none: quick rounds are answered quickly, and idle clients cost little.

What the owner should know goes to standard output, a line each, with the client's name where there are several; the
rest to `node.log` of the client's folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from pathlib import Path

from fedquilt._util.lock import Held, Lock
from fedquilt._util.turns import one_at_a_time
from fedquilt.deploy.device.check_folder import check
from fedquilt.deploy.device.device import Device
from fedquilt.deploy.device.fleet import BEAT_EVERY, Fleet, reason
from fedquilt.deploy.ops.client_processes import BEAT, LOG, REFUSED
from fedquilt.deploy.ops.processes import rotate
from fedquilt.deploy.project import Node

_SHARE, _OFTEN, _SELDOM = 0.25, 0.2, 3.0  # the next question after this share of the time without a letter; seconds
_LONGEST = 10.0  # seconds between two attempts where waiting helps
_LONGEST_FOR_GOOD = 240.0  # and where somebody has to do something
_GLITCH = 5.0  # seconds of trouble that nobody needs to hear of
_LOST = 900.0  # seconds without the server after which the process starts afresh, whatever keeps it from there


def pause_after(silent: float) -> float:
    """Seconds until the server is asked again, that long after the last letter.

    >>> [pause_after(silent) for silent in (0.1, 2.0, 10.0, 3600.0)]
    [0.2, 0.5, 2.5, 3.0]
    """
    return min(_SELDOM, max(_OFTEN, _SHARE * silent))


class ClientLoop:
    """One client: its device, and its connection to the server."""

    def __init__(self, folder: Path, data: Path, say: Callable[[str], None]) -> None:
        self.node = Node.read(folder)
        self.say, self.log = say, folder / LOG
        self.device = Device(folder, data, self.note)
        self.fleet = Fleet(self.node)
        self.over = threading.Event()
        self._known = ""  # the trouble that the owner was told of
        self._since: float | None = None  # when trouble began
        self._let_in = False  # which is news
        self._heard: float | None = time.monotonic()  # when the server last answered; None while the device works

    def note(self, text: str) -> None:
        """A line in the client's own log, with its time; where the disk is full, it goes without."""
        with suppress(OSError):
            rotate(self.log)
            with self.log.open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(' ', 'seconds')} {text}\n")

    def run(self) -> None:
        """Until it is over: comes in, takes letters, and tries again whatever happens."""
        threading.Thread(target=self._beat, daemon=True).start()
        pause, letter_at = 0.5, time.monotonic() - 60
        while not self.over.is_set():
            try:
                if not self.fleet.number:
                    self.fleet.come_in()
                    self._let_in = True
                letter = self.fleet.letter()
                self._well()
                if letter is not None:
                    start, self._heard = time.monotonic(), None
                    answer = self._answer(letter.content)
                    self._heard = end = time.monotonic()
                    self.fleet.answer(letter, answer, end - start)
                    letter_at = time.monotonic()
                pause = 0.5
                self.over.wait(pause_after(time.monotonic() - letter_at))
            except Exception as error:
                lasting = self._trouble(error)
                self.over.wait(pause)
                pause = min(2 * pause, _LONGEST_FOR_GOOD if lasting else _LONGEST)
        self.fleet.leave()

    def _answer(self, letter: bytes) -> bytes:
        """An empty answer where the device's own program fails: no text of an exception leaves it."""
        try:
            with one_at_a_time:
                return self.device.handle(letter)
        except Exception:
            self.note(traceback.format_exc())
            return b""

    def _beat(self) -> None:
        """A thread's work: that the client is there, also while it trains. One that the server has forgotten comes in
        again; other trouble is the loop's to tell."""
        while not self.over.wait(BEAT_EVERY):
            try:
                if self.fleet.number and not self.fleet.beat():
                    self.fleet.number = 0
            except Exception as error:
                self.note(f"the server was not told that this client is there ({type(error).__name__})")

    def lost(self) -> bool:
        """Whether there was no way to the server for so long that something here may be to blame: a process that
        starts afresh has new connections, and reads its folder again, where somebody may have mended something."""
        heard = self._heard
        return heard is not None and time.monotonic() - heard > _LOST

    def _well(self) -> None:
        """The server has answered."""
        self._heard = time.monotonic()
        if self._known or self._let_in:
            self.say("the server is there")
        self._known, self._since, self._let_in = "", None, False

    def _trouble(self, error: Exception) -> bool:
        """Tells the owner what is wrong, once, if it is more than a glitch; whether waiting alone will not mend it."""
        why, lasting = reason(error, self.node)
        now = time.monotonic()
        self._since = self._since or now
        if why != self._known and (lasting or now - self._since > _GLITCH):
            self.say(why)
            self._known = why
        self.note(f"{why} ({type(error).__name__})")
        if lasting:
            self.fleet.number = 0  # once it is let in again, it says so
        return lasting


def serve(folders: Sequence[Path], all_data: Sequence[Path]) -> None:
    """Runs the clients of some folders in this process until it is told to end."""
    loops = []
    for folder, data in zip(folders, all_data, strict=True):
        name = "" if len(folders) == 1 else f"{Node.read(folder).name}: "
        loops.append(ClientLoop(folder, data, lambda line, name=name: print(name + line, flush=True)))  # type: ignore[misc]
    ended = threading.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: ended.set())
    threads = [threading.Thread(target=loop.run, daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    while not ended.wait(BEAT_EVERY / 2):
        with suppress(OSError):
            (folders[0] / BEAT).touch()  # whoever started this process sees that it moves
        if not all(thread.is_alive() for thread in threads):
            os._exit(1)  # a client without its loop would look as if it were there
        if all(loop.lost() for loop in loops):
            loops[0].note(f"no word from the server for {_LOST / 60:.0f} minutes")  # which is told when it starts again
            os._exit(1)
    for loop in loops:
        loop.over.set()
    end = time.monotonic() + 5
    for loop, thread in zip(loops, threads, strict=True):
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():  # it trains
            loop.fleet.leave()


def main() -> None:
    """`python -m fedquilt.deploy.device.node FOLDER DATA [FOLDER DATA ...]`."""
    words = [Path(word) for word in sys.argv[1:]]
    folders, all_data = words[::2], words[1::2]
    with ExitStack() as stack:
        for folder, data in zip(folders, all_data, strict=True):
            wrong = check(folder, data)
            try:
                lock = Lock(folder)
                lock.take()
                stack.callback(lock.release)
            except Held as error:
                wrong = wrong or str(error)
            if wrong:
                print(f"{REFUSED}{wrong}", flush=True)
                os._exit(2)
        serve(folders, all_data)
    os._exit(0)


if __name__ == "__main__":
    main()
