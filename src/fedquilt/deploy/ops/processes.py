"""Processes of a federation, started with a log of their own and ended without leaving anything behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PATIENCE = 60.0  # seconds that a process gets to answer for the first time


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment.

    >>> 1024 <= free_port() < 65536
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((host, port)) == 0


def program(name: str) -> str:
    """The full path of a program that came with a package of this Python."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FileNotFoundError(f"{name} is not installed beside {sys.executable}; install `fedquilt[deploy]`")
    return str(path)


def environment(home: Path) -> dict[str, str]:
    """The environment of every Flower process: no telemetry, no update check, nothing installed at run time."""
    programs = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": programs + os.pathsep + os.environ.get("PATH", ""),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    }


class Failed(OSError):
    """Something outside this program did not do what it should; the sentence says what and where to look."""


@dataclass
class Service:
    """A process and everything it starts."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @staticmethod
    def start(
        name: str, command: Sequence[str], log: Path, env: Mapping[str, str], stdout: int | None = None
    ) -> Service:
        """Starts a command in a process group of its own, its output appended to a log file; on wish its standard
        output goes elsewhere."""
        log.parent.mkdir(parents=True, exist_ok=True)
        rotate(log)
        with log.open("ab") as out:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=out,
                env=dict(env),
                start_new_session=True,
                preexec_fn=_end_with_parent if sys.platform == "linux" else None,
            )
        return Service(name, process, log)

    @property
    def alive(self) -> bool:
        """Whether the process still runs. One that has ended is not reaped before `kill`, so that its number, which is
        also that of its group, cannot become another's in the meantime."""
        if self.process.returncode is not None:
            return False
        if not hasattr(os, "waitid"):  # macOS
            return self.process.poll() is None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def stop(self, patience: float = 10.0) -> None:
        """Asks the process to end, and ends it and what it started if it does not."""
        end = time.monotonic() + patience
        if self.alive:
            os.kill(self.process.pid, signal.SIGTERM)
        while self.alive and time.monotonic() < end:
            time.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Ends the process and everything in its group at once, as a power cut would."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()

    def tail(self, lines: int = 15) -> str:
        """The end of the log, for an error message."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def wait_until(self, ready: Callable[[], bool], what: str, patience: float = _PATIENCE) -> None:
        """Waits until `ready()`, or ends the process and says what went wrong with the end of the log."""
        end = time.monotonic() + patience
        while not ready():
            if not self.alive:
                self.kill()
                raise Failed(f"{self.name} ended while {what}; the end of {self.log}:\n{self.tail()}")
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"{self.name}: {what} took more than {patience:.0f} s; see {self.log}")
            time.sleep(0.1)


def rotate(log: Path, largest: int = 20 << 20) -> bool:
    """Puts what a log that has grown large holds aside, in place of what was put aside before; whether it did.

    The file itself stays, since processes hold it open and write to its end.

    >>> import tempfile
    >>> log = Path(tempfile.mkdtemp()) / "log"
    >>> with log.open("a") as file:
    ...     _ = file.write("much"), file.flush()
    ...     done = rotate(log, largest=4)
    ...     _ = file.write("more")
    >>> done, log.read_text(), log.with_name("log.1").read_text()
    (True, 'more', 'much')
    """
    if not log.is_file() or log.stat().st_size < largest:
        return False
    shutil.copyfile(log, log.with_name(log.name + ".1"))
    os.truncate(log, 0)
    return True


def _end_with_parent() -> None:
    """Runs in the new process: when the one that started it dies, even by force, this one is told to end."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1 is PR_SET_PDEATHSIG
