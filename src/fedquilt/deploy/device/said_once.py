"""What a device says once in a round, noted in a small file that a kill does not take away and time does not fill."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from fedquilt._util.files import write_bytes


class SaidOnce:
    """Of the last `kept` rounds that a client was asked in, what it said; of those before, that it says nothing more.

    So an earlier round that comes again is answered as one in which other things were said: it is not known any more
    whether there were any.

    >>> import tempfile
    >>> said = SaidOnce(Path(tempfile.mkdtemp()) / "asked", kept=2)
    >>> [said.once(3, word) for word in ("this", "this", "that")]
    [True, True, False]
    >>> [said.once(round_, "this") for round_ in (4, 5, 3, 4)]
    [True, True, False, True]
    """

    def __init__(self, path: Path, kept: int) -> None:
        self.path, self.kept = path, kept

    def once(self, round_: int, said: str) -> bool:
        """Whether this is the first time that something is said in a round, or the same once more."""
        over, known = self._read()
        digest = hashlib.sha256(said.encode()).hexdigest()
        if round_ <= over or round_ in known:
            return known.get(round_) == digest
        known[round_] = digest
        for earliest in sorted(known)[: -self.kept]:
            del known[earliest]
            over = earliest
        told = {"over": over, "rounds": {str(number): known[number] for number in sorted(known)}}
        write_bytes(self.path, json.dumps(told).encode())
        return True

    def may_have(self, round_: int) -> bool:
        """Whether something was said in a round, as far as is known."""
        over, known = self._read()
        return round_ <= over or round_ in known

    def _read(self) -> tuple[int, dict[int, str]]:
        """Up to which round all is over, and what was said in those after it."""
        if not self.path.is_file():
            return 0, {}
        told = json.loads(self.path.read_bytes())
        return told["over"], {int(number): digest for number, digest in told["rounds"].items()}
