"""Readers of pages: each in a process of its own, forked from one that has imported what all of them import.

Importing PyTorch takes longer than most pages do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class Said(NamedTuple):
    """How a reader ended, and what it printed."""

    code: int
    out: str
    err: str


class Readers:
    """Runs pages' code as `python -c` would, with every warning an error and one thread."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "MPLBACKEND": "agg"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def read(self, code: str, folder: Path) -> Said:
        """Run some code in a folder, in a fresh process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([code, str(folder)]), file=self.process.stdin, flush=True)
        return Said(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """Send the readers home."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def _reader(code: str, folder: str) -> int:
    """The status of a fork of this process in which the code ran, with its output in two files."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        os.chdir(folder)
        for number, name in ((1, "out.txt"), (2, "err.txt")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        sys.modules["__main__"] = main = ModuleType("__main__")  # a page starts with nothing
        exec(compile(code, "<string>", "exec"), main.__dict__)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve() -> None:
    import fedquilt

    for name in ("run", "methods", "scenarios"):
        getattr(fedquilt, name)  # imports what it needs, PyTorch among it
    import torch._dynamo  # noqa: F401  # takes a second, and the first step of a stack imports it

    for line in sys.stdin:
        code, folder = json.loads(line)
        status = _reader(code, folder)
        told = [Path(folder, name).read_text(encoding="utf-8") for name in ("out.txt", "err.txt")]
        print(json.dumps([status, *told]), flush=True)


if __name__ == "__main__":
    _serve()
