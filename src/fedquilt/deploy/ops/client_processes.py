"""A device, or a site with many: the process of its clients, started again when it ends, until somebody ends us.

`fedquilt deploy client` becomes this module once it has looked at its words: what stays for months beside the clients'
process is small, and imports next to nothing.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedquilt._util.lines import for_terminal
from fedquilt.deploy.ops.processes import Service, environment

BEAT, LOG = "node.beat", "node.log"  # a file that the process touches while it moves; what it has to say in detail
REFUSED = "refused: "  # before the sentence about why it cannot start at all
_LONGEST_PAUSE = 240.0  # seconds
_HUNG = 120.0  # seconds without a beat after which a process is ended from outside
_LOOK = 5.0  # seconds between two looks at its beat
_CALM = 120.0  # seconds that it must have lived for the pauses to be short again


def start_nodes(folders: Sequence[Path], all_data: Sequence[Path]) -> Service:
    """Starts the process of some clients; what their owner should know comes on its standard output."""
    command = [sys.executable, "-m", "fedquilt.deploy.device.node", *words_for(folders, all_data)]
    env = environment(folders[0] / "flower")
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 2) // 2)))
    return Service.start("the clients' process", command, folders[0] / LOG, env, stdout=subprocess.PIPE)


def words_for(folders: Sequence[Path], all_data: Sequence[Path]) -> list[str]:
    """Clients' folders, each followed by its data, as words of a command."""
    return [str(path.resolve()) for pair in zip(folders, all_data, strict=True) for path in pair]


def become_keeper(folders: Sequence[Path], all_data: Sequence[Path]) -> None:
    """Turns this process into the one that watches over some clients; it does not come back."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", __name__, *words_for(folders, all_data)])


@dataclass
class Care:
    """Watches over the clients of some folders; what happens to them is a sentence each."""

    folders: Sequence[Path]
    all_data: Sequence[Path]
    pause: float = 2.0

    def keep_running(self) -> Iterator[str]:
        """Starts the process again whenever it has ended or does nothing any more, and says so.

        What is wrong with a folder or its data is an error at the first start; later, when somebody has changed
        something, a sentence. The pauses grow to some minutes, and are short again once it has run for a while.
        """
        pause, first = self.pause, True
        while True:
            service = start_nodes(self.folders, self.all_data)
            start = time.monotonic()
            wrong = ""
            try:
                for line in self._lines(service):
                    if line.startswith(REFUSED):
                        wrong = line.removeprefix(REFUSED)
                    else:
                        yield line
            finally:
                service.stop()
            if wrong and first:
                raise ValueError(wrong)
            first = False
            pause = self.pause if time.monotonic() - start > _CALM else min(2 * pause, _LONGEST_PAUSE)
            yield f"{wrong or self._last_words(service)}; it is started again in {pause:.0f} s"
            time.sleep(pause)

    def _lines(self, service: Service) -> Iterator[str]:
        """What the process says, until it ends or does nothing any more."""
        pipe, rest = service.process.stdout, b""
        assert pipe is not None
        beat, seen, moved = self.folders[0] / BEAT, 0.0, time.monotonic()
        while True:
            if select.select([pipe], [], [], _LOOK)[0]:
                found = os.read(pipe.fileno(), 65536)
                if not found:
                    return
                *whole, rest = (rest + found).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
            now = beat.stat().st_mtime if beat.exists() else 0.0
            if now != seen:  # times are not compared with the clock, which may be set meanwhile
                seen, moved = now, time.monotonic()
            if time.monotonic() - moved > _HUNG:
                yield f"the process has not moved for {_HUNG:.0f} s"
                service.kill()
                return

    def _last_words(self, service: Service) -> str:
        words = service.tail(1).strip()
        return "its process ended" + (f", after these words: {words[:200]}" if words else "")


def main() -> int:
    """`python -m fedquilt.deploy.ops.client_processes FOLDER DATA [FOLDER DATA ...]`: until it is ended, a good end."""
    paths = [Path(word) for word in sys.argv[1:]]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for sentence in Care(paths[::2], paths[1::2]).keep_running():
            print(for_terminal(f"{time.strftime('%H:%M:%S')} {sentence}", sys.stdout), flush=True)
    except KeyboardInterrupt:
        print("ended", flush=True)
        return 0
    except (ValueError, OSError) as error:
        print(for_terminal(str(error), sys.stderr), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
