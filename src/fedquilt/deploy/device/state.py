"""What a client must not lose, in files on its device: private units and whatever else it keeps between rounds.

A round's outcome is staged first and counts only when the server has said that it accepted the update made with it:

1. A message comes in with the token of the last update of this client that the server accepted and saved.
2. `settle`: the staged outcome becomes the committed one if it has that token, and is dropped if it has not.
3. The client trains from the committed state, and `stage`s the outcome under the token of this message.
4. The update is sent, with the token.

The server saves a round before it sends the next one's messages, so the state that it will name is always the
committed or the staged one: a crash of either side, at any moment, loses nothing. A round that is repeated starts from
the same committed state and gives the same result. The last few committed states are kept as well, so that the server
can go back by some rounds. Files are written beside their place and renamed, so that each
is whole or absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedquilt._util.files import sync_folder, write_bytes
from fedquilt._util.lock import in_turn
from fedquilt.deploy.device.said_once import SaidOnce
from fedquilt.deploy.names import plain_name

Arrays = dict[str, NDArray[np.generic]]
EARLIER_STATES = 5  # how many committed states are kept beside the last one
FRESH = ""  # the token of a client that the server has accepted nothing from yet


class LostState(Exception):
    """The server names a state that this device does not have: its files were deleted or it is another device."""


class NodeState:
    """The state of one client in one run.

    >>> import tempfile
    >>> state = NodeState(Path(tempfile.mkdtemp()), "run-1")
    >>> state.settle(FRESH) is None
    True
    >>> state.stage("t1", {"head": np.ones(2, np.float32)}, {"round": "1"})
    >>> arrays, told = state.settle("t1")
    >>> arrays["head"].tolist(), told["round"]
    ([1.0, 1.0], '1')
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder / run
        self.folder.mkdir(parents=True, exist_ok=True)
        self.committed = self.folder / "committed.safetensors"
        self.staged = self.folder / "staged.safetensors"
        self.earlier = self.folder / "earlier"

    def alone(self) -> AbstractContextManager[None]:
        """Waits until no other process of this client works on the state: one of a killed node may still run."""
        return in_turn(self.folder / "lock")

    def settle(self, accepted: str) -> tuple[Arrays, dict[str, str]] | None:
        """The state that the server knows, or None for a client that starts; `LostState` if it is not here."""
        if self.staged.exists():
            if accepted != FRESH and _token(self.staged) == accepted:
                self._put_by()
                self.staged.replace(self.committed)
            else:
                self.staged.unlink()
            sync_folder(self.folder)
        if accepted == FRESH:
            self.committed.unlink(missing_ok=True)
            return None
        before = self.earlier / f"{accepted}.safetensors"
        if plain_name(accepted) and before.exists():  # the server went back by some rounds
            before.replace(self.committed)
        if not self.committed.exists() or _token(self.committed) != accepted:
            raise LostState
        try:
            with safe_open(self.committed, framework="np") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except SafetensorError:
            raise LostState from None

    def _put_by(self) -> None:
        """Keeps the committed state under its token, and removes those that are too old."""
        token = _token(self.committed) if self.committed.exists() else FRESH
        if plain_name(token):
            self.earlier.mkdir(exist_ok=True)
            self.committed.replace(self.earlier / f"{token}.safetensors")
            for old in sorted(self.earlier.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-EARLIER_STATES]:
                old.unlink()

    def said_once(self, what: str) -> SaidOnce:
        """What is said once in a round: noted for all rounds that the server can go back to, and the one at work."""
        return SaidOnce(self.folder / what, EARLIER_STATES + 1)

    def stage(self, token: str, arrays: Mapping[str, NDArray[np.generic]], told: Mapping[str, str]) -> None:
        """Lays an outcome down beside the committed state."""
        if token == FRESH:
            raise ValueError("a staged state needs a token")
        write_bytes(self.staged, save(dict(arrays), metadata={**told, "token": token}))


def _token(path: Path) -> str:
    """The token of a file; that of no update, if the file was damaged."""
    try:
        with safe_open(path, framework="np") as file:
            return str((file.metadata() or {}).get("token", FRESH))
    except SafetensorError:
        return FRESH
