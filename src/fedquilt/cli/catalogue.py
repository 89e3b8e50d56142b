"""`fedquilt list ...`: what there is, by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedquilt._util.suggest import did_you_mean
from fedquilt._util.wording import first_line
from fedquilt.cli import options as opt
from fedquilt.cli.output import Refused, out, print_json

Entry = dict[str, Any]


def entries(known: Iterable[tuple[str, Callable[..., Any]]], with_settings: bool = True) -> list[Entry]:
    """Name, first line and settings of things that can be made."""
    from fedquilt.cli.settings import spec_of

    made = []
    for name, thing in known:
        entry: Entry = {"name": name, "about": first_line(thing)}
        if with_settings:
            spec = spec_of(thing)
            entry["settings"] = {key: spec.defaults.get(key) for key in spec.hints}
        made.append(entry)
    return made


def methods() -> list[Entry]:
    """Every method, in families, with its paper and its settings; then those of installed packages."""
    from fedquilt.methods import FAMILIES
    from fedquilt.methods.find import registered

    found: list[Entry] = []
    for family, kinds in FAMILIES.items():
        for entry, paper in zip(entries((kind.name, kind) for kind in kinds), kinds.values(), strict=True):
            found.append({**entry, "family": family, "paper": paper})
    for name, brought in registered().items():
        try:
            (entry,) = entries([(name, brought.load())])
        except ValueError as error:  # one package that does not do is no reason to hide the others
            entry = {"name": name, "about": str(error)}
        found.append({**entry, "family": f"from the package {brought.package}", "package": brought.package})
    return found


def scenarios() -> list[Entry]:
    """Every scenario and its settings."""
    from fedquilt.scenarios import SCENARIOS

    return entries(SCENARIOS.items())


def models() -> list[Entry]:
    """Every network."""
    from fedquilt.models import MODELS

    return entries(MODELS.items(), with_settings=False)


def readouts() -> list[Entry]:
    """Every way to predict."""
    from fedquilt.readouts import READOUTS

    return entries(READOUTS.items())


def merges() -> list[Entry]:
    """Every way copies become one; then what may come before it, as in `nnm+krum`."""
    from fedquilt.sharing import MERGES, PRESTEPS

    before = ((f"{name}+...", step) for name, step in PRESTEPS.items())
    return entries([*MERGES.items(), *before])


def attacks() -> list[Entry]:
    """Every way in which clients may lie, to see what a merge bears."""
    from fedquilt.attacks import ATTACKS

    return entries(ATTACKS.items())


KINDS: dict[str, Callable[[], list[Entry]]] = {
    "methods": methods, "scenarios": scenarios, "models": models, "readouts": readouts, "merges": merges,
    "attacks": attacks,
}  # fmt: skip
DATA = "data"
Kind = Annotated[
    str | None, typer.Argument(metavar="[KIND]", help="methods, scenarios, models, readouts, merges, attacks or data.")
]


def list_(kind: Kind = None, json: opt.AsJson = False) -> None:
    """What there is: methods, scenarios, models, readouts, merges, attacks or data."""
    if kind is None:
        list_kinds(json)
        return
    if kind == DATA:
        from fedquilt.cli.data import list_data

        list_data(None, json)
        return
    if kind not in KINDS:
        raise Refused(did_you_mean(kind, [*KINDS, DATA], "list of"))
    found = KINDS[kind]()
    if json:
        print_json([{**entry, "settings": _plain(entry.get("settings", {}))} for entry in found])
        return
    width = max(len(entry["name"]) for entry in found)
    for family, members in itertools.groupby(found, key=lambda entry: entry.get("family", "")):
        if family:
            out.print(Text(family, style="italic"))
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True, min_width=width)
        table.add_column()
        for entry in members:
            table.add_row(Text(entry["name"]), _told(entry))
        out.print(table)
        if family:
            out.print()


def list_kinds(json: bool) -> None:
    """What there are lists of, and how many are in each."""
    from fedquilt.data import SOURCES

    found = {kind: (len(KINDS[kind]()), first_line(KINDS[kind])) for kind in KINDS}
    found[DATA] = (len(SOURCES), "Every data set, and whether it is here.")
    if json:
        print_json([{"name": kind, "number": number, "about": about} for kind, (number, about) in found.items()])
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    for kind, (number, about) in found.items():
        table.add_row(Text(f"fedquilt list {kind}", style="bold"), str(number), Text(about))
    out.print(table)


def _told(entry: Entry) -> Text:
    """What is said of one of them: a line, its paper, and its settings."""
    text = Text(entry["about"])
    if entry.get("paper"):
        text.append(f" ({entry['paper']})")
    if entry.get("settings"):
        settings = " ".join(f"{key}={shown(value)}" for key, value in entry["settings"].items())
        text.append(f"\n{settings}", style="dim")
    return text


def shown(value: Any) -> str:
    """A default as `--set` takes it.

    >>> shown((0.5, 0.75)), shown(None), shown(True), shown({"operation": "cohort"})
    ('0.5,0.75', 'none', 'true', 'operation:cohort')
    """
    if isinstance(value, dict):
        return ",".join(f"{key}:{shown(entry)}" for key, entry in value.items())
    if isinstance(value, (tuple, list)):
        return ",".join(shown(entry) for entry in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    simple = (bool, int, float, str, tuple, list, dict)
    return {key: value if value is None or isinstance(value, simple) else str(value) for key, value in settings.items()}
