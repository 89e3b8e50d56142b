"""A federation on disk: `federation.toml` and keys for the operator, one folder for each client.

* DIR/federation.toml : what the operator decides: address, rounds, transfer, scenario
* DIR/authority/ : the private authority's key: keep it, and keep it here
* DIR/server/ : certificate, database, logs, nginx's files
* DIR/common.npz : what the server holds, if anything
* DIR/clients/NAME/ : all that client NAME needs: copy it to the device, then delete it here
* DIR/runs/ : results, as ordinary run directories
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedquilt._util.files import write_text
from fedquilt._util.toml import to_toml
from fedquilt.secure import SecureSums

FEDERATION, CLIENT = "federation.toml", "client.toml"
UNKNOWN_KEY = "its key is not registered: it was never, or it was replaced or removed; ask the federation's operator"


@dataclass(frozen=True)
class Rounds:
    """When a round is over: all have answered; or the share `quorum` of the asked clients has, and `grace` seconds more
    have passed; or `timeout` seconds have. With fewer than a quorum the round is repeated, at most `attempts` times in
    a row. Who was silent twice in a row is not asked for 1, 2, 4, ... rounds. Where a round takes some of the clients,
    `spare` asks for that share more, and takes those who answer first."""

    timeout: float = 300.0
    quorum: float = 0.5
    attempts: int = 10
    grace: float = 60.0
    spare: float = 0.0

    def __post_init__(self) -> None:
        if not self.grace >= 0 or not 0 <= self.spare <= 1:
            raise ValueError("[rounds]: grace must be 0 or more seconds and spare a share in [0, 1]")
        if not self.timeout > 0 or not 0 < self.quorum <= 1 or self.attempts < 1:
            raise ValueError("[rounds]: timeout and attempts must be above 0 and quorum a share in (0, 1]")


@dataclass(frozen=True)
class Transfer:
    """What is too much. An update is refused whose difference to what the client was sent has
    `largest_change` times the norm of that (or of ones), or is `most_times_others` times what is usual in the round. A
    client may declare `most_samples` samples, and counts for at most `most_times_median` times the median."""

    largest_change: float = 1000.0
    most_times_others: float = 30.0
    most_samples: int = 1_000_000
    most_times_median: float = 10.0

    def __post_init__(self) -> None:
        if not self.largest_change > 1:
            raise ValueError("[transfer]: largest_change must be above 1")
        if not self.most_times_others > 1 or not self.most_times_median >= 1 or self.most_samples < 1:
            raise ValueError("[transfer]: most_times_others must be above 1, the other bounds at least 1")


@dataclass(frozen=True)
class Address:
    """Where the server is. `listen` is the interface nginx listens on, `hosts` the names in the certificate, the first
    of which clients are told. `tls` and `authentication` are off only by an explicit flag."""

    listen: str = "127.0.0.1"
    port: int = 8443
    hosts: tuple[str, ...] = ("localhost",)
    tls: bool = True
    authentication: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts or not 0 < self.port < 65536:
            raise ValueError("[server]: give at least one host and a port between 1 and 65535")
        if self.authentication and not self.tls:
            raise ValueError("[server]: Flower authenticates nodes over TLS only; switch both off or neither")

    @property
    def reachable(self) -> str:
        """An address of this machine that reaches what listens."""
        return "127.0.0.1" if self.listen in ("0.0.0.0", "") else self.listen

    @property
    def warning(self) -> str | None:
        """What somebody who switched protection off must read, or None."""
        return warning(self.tls, self.authentication)


@dataclass(frozen=True)
class FederationSpec:
    """What a federation is about, as far as its server may know: never a client's data."""

    scenario: str = "own"
    classes: int = 2
    label_names: tuple[str, ...] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    common: str = ""
    public_test: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)  # as `Task.told` has it; empty: plain classification

    def __post_init__(self) -> None:
        object.__setattr__(self, "label_names", tuple(self.label_names))


@dataclass(frozen=True)
class Project:
    """A federation's folder as its operator sees it."""

    folder: Path
    server: Address
    rounds: Rounds
    transfer: Transfer
    spec: FederationSpec
    clients: tuple[str, ...]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # how the server builds each architecture
    secure: SecureSums | None = None

    @staticmethod
    def read(folder: Path) -> Project:
        """Reads `federation.toml`; a mistake in it is a sentence that names the table."""
        path = folder / FEDERATION
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {FEDERATION}; make a project with `fedquilt deploy init {folder}`"
            )
        with path.open("rb") as file:
            content = tomllib.load(file)
        if content.get("transfer", {}).pop("dtype", "float32") != "float32":
            raise ValueError(
                f"{path}, table [transfer]: dtype is not said here any more; remove it, and start runs with "
                "--set compress.up=float16 compress.down=float16"
            )
        known = {"server": Address, "rounds": Rounds, "transfer": Transfer, "scenario": FederationSpec}
        known |= {"secure": SecureSums}
        tables: dict[str, Any] = {}
        for name, kind in known.items():
            if name == "secure" and name not in content:
                continue
            try:
                tables[name] = kind(**content.pop(name, {}))
            except TypeError as error:
                raise ValueError(f"{path}, table [{name}]: {error}".replace("__init__() ", "")) from None
        clients, models = tuple(content.pop("clients", ())), content.pop("models", {})
        if content:
            raise ValueError(
                f"{path}: '{next(iter(content))}' is not known; known are clients, models, {', '.join(known)}"
            )
        return Project(
            folder.resolve(),
            tables["server"],
            tables["rounds"],
            tables["transfer"],
            tables["scenario"],
            clients,
            models,
            tables.get("secure"),
        )

    def write(self) -> None:
        """Writes `federation.toml`."""
        content = {
            "clients": list(self.clients),
            "server": asdict(self.server),
            "rounds": asdict(self.rounds),
            "transfer": asdict(self.transfer),
            "scenario": asdict(self.spec),
            "models": self.models,
        } | ({} if self.secure is None else {"secure": self.secure.text})
        write_toml(self.folder / FEDERATION, content)

    @property
    def server_folder(self) -> Path:
        return self.folder / "server"

    @property
    def flower_home(self) -> Path:
        return self.server_folder / "flower"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def client_folder(self, name: str) -> Path:
        return self.folder / "clients" / name

    def public_key(self, name: str) -> Path:
        """A client's public key; the operator keeps it even after the client's folder has moved to its device."""
        return self.server_folder / "keys" / f"{name}.pub"

    def nodes(self) -> dict[int, str]:
        """Flower's number of each registered client -> its name."""
        return _numbered(self.server_folder / "nodes.json")

    def registered(self) -> dict[int, str]:
        """Flower's number of each registered client -> the public key it was registered with."""
        return _numbered(self.server_folder / "registered.json")

    def write_nodes(self, nodes: Mapping[int, str], keys: Mapping[int, str]) -> None:
        """Keeps the numbers and keys that clients were registered under."""
        for file, content in (("registered.json", keys), ("nodes.json", nodes)):
            write_text(self.server_folder / file, json.dumps({str(k): v for k, v in content.items()}))


def _numbered(path: Path) -> dict[int, str]:
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {int(number): text for number, text in found.items()}


@dataclass(frozen=True)
class Node:
    """A client's folder as its device sees it."""

    folder: Path
    name: str
    host: str
    port: int
    tls: bool
    authentication: bool
    traits: Mapping[str, str]
    labels: tuple[int, ...] | None
    model: Mapping[str, Any]
    changes: Mapping[str, Mapping[str, Any]]
    allow: tuple[str, ...] = ()  # addresses of methods beside the library's that the device's owner lets it run
    classes: int = 0  # of the federation; 0 where an older folder does not say
    task: Mapping[str, Any] = field(default_factory=dict)  # what there is to predict; empty: plain classification
    secure: bool = False  # whether copies leave the device under secure sums only

    @staticmethod
    def read(folder: Path) -> Node:
        """Reads `client.toml`."""
        path = folder / CLIENT
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no {CLIENT}; give the folder of one client, DIR/clients/NAME of a project"
            )
        with path.open("rb") as file:
            content = tomllib.load(file)
        missing = [key for key in ("name", "host", "port", "model") if key not in content]
        if missing:
            raise ValueError(f"{path}: '{missing[0]}' is missing")
        labels, allow = content.get("labels"), content.get("methods", {}).get("allow", [])
        if not isinstance(allow, list) or not all(isinstance(address, str) for address in allow):
            raise ValueError(f'{path}, table [methods]: write allow = ["file.py:Class", "package.module:Class"]')
        return Node(
            folder=folder.resolve(),
            name=content["name"],
            host=content["host"],
            port=content["port"],
            tls=content.get("tls", True),
            authentication=content.get("authentication", True),
            traits=content.get("traits", {}),
            labels=None if labels is None else tuple(labels),
            model=content["model"],
            changes=content.get("changes", {}),
            allow=tuple(allow),
            classes=int(content.get("classes", 0)),
            task=content.get("task", {}),
            secure=bool(content.get("secure", False)),
        )

    @property
    def warning(self) -> str | None:
        """What the owner of the device must read if protection is off, or None."""
        return warning(self.tls, self.authentication)

    def write(self) -> None:
        """Writes `client.toml`."""
        apart = ("folder", "allow")
        content = {key: value for key, value in asdict(self).items() if key not in apart and value is not None}
        write_toml(self.folder / CLIENT, content | ({"methods": {"allow": self.allow}} if self.allow else {}))


def loose(path: Path) -> str | None:
    """What the owner of a key that others can read must hear, or None."""
    if not path.is_file() or not path.stat().st_mode & 0o077:
        return None
    return f"{path} can be read by other accounts of this machine; take that away with: chmod 600 {path}"


def warning(tls: bool, authentication: bool) -> str | None:
    """What somebody who switched protection off must read, or None."""
    if not tls:
        return "TLS and node authentication are OFF: everybody on the network can read the updates and join."
    if not authentication:
        return "Node authentication is OFF: everybody who holds the CA certificate can join under any name."
    return None


def write_toml(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a TOML file."""
    write_text(path, to_toml(content))
