"""The quilt in the terminal: a row per client, a column per unit, a patch per circle, blank where private.

A letter and a colour stand for a group of clients: patches that look alike, in one column or in several, are shared by
exactly the same clients. The letter alone tells them apart, so the picture reads without colour too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from fedquilt.sharing import MixedUnit, Plan, UnitPlan

# Okabe and Ito's colours, told apart by colour-blind readers too, and the colour of letters that shows on each.
PALETTE = (
    ("#56B4E9", "#000000"),
    ("#E69F00", "#000000"),
    ("#009E73", "#FFFFFF"),
    ("#F0E442", "#000000"),
    ("#0072B2", "#FFFFFF"),
    ("#D55E00", "#FFFFFF"),
    ("#CC79A7", "#000000"),
    ("#999999", "#000000"),
)
FILLS = " ░╱·+:"  # when the colours come round again, the cloth gets a pattern
BLANK, MIXED = -1, -2
NARROWEST, READABLE, WIDEST = 3, 7, 14  # columns of a cell

Cells = tuple[int, ...]  # the group of one client in each unit


def letters(group: int) -> str:
    """A name for a group: A to Z, then AA, AB, ...

    >>> [letters(i) for i in (0, 25, 26, 52)]
    ['A', 'Z', 'AA', 'BA']
    """
    name = ""
    group += 1
    while group:
        group, digit = divmod(group - 1, 26)
        name = chr(ord("A") + digit) + name
    return name


def style(group: int) -> str:
    """The rich style of a group's patch."""
    back, front = PALETTE[group % len(PALETTE)]
    return f"{front} on {back}"


def patch(group: int, width: int) -> Text:
    """One cell: the group's letter in the middle of its cloth.

    >>> patch(0, 5).plain, patch(9, 5).plain, patch(-1, 5).plain
    ('  A  ', '░░J░░', '     ')
    """
    if group == BLANK:
        return Text(" " * width)
    if group == MIXED:
        return Text("~".center(width), style="reverse")
    name = letters(group)
    if len(name) > width:
        name = name[: width - 1] + "…"
    fill = FILLS[group // len(PALETTE) % len(FILLS)]
    return Text(name.center(width, fill), style=style(group))


@dataclass(frozen=True)
class Quilt:
    """A plan to look at: `console.print(Quilt(plan, names))`, or `str(Quilt(plan, names))` for plain text.

    Up to `rows` clients have a row each, ordered so that patches show. Of more, those with the same circles everywhere
    share a row, the most frequent patterns first.

    >>> from fedquilt.sharing import by_trait, everyone, nobody
    >>> plan = everyone(["base"], [1] * 4) | by_trait(["mid"], ["x", "y", "x", "y"]) | nobody(["head"], 4)
    >>> print(Quilt(plan, ["ann", "bob", "cem", "dot"]))
          base mid  head
      ann  A    B
      cem  A    B
      bob  A    C
      dot  A    C
    A 4 clients, B 2, C 2. The same letter is the same clients; blank stays private.
    """

    plan: Plan
    names: Sequence[str] | None = None
    rows: int = 40

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self.lines(100))

    def lines(self, width: int) -> Iterator[Text]:
        """The picture for a terminal of that many columns, line by line."""
        cells, sizes = groups(self.plan)
        heads = list(self.plan.units)
        labels, more = self._rows(cells)
        side = min(max(cell_len(label) for label, _ in labels), max(8, width // 4))
        room = width - side - 3
        if len(heads) * (min(READABLE, _width(heads)) + 1) > room:
            heads, keep = _alike(heads, cells)
            labels = [(label, tuple(row[i] for i in keep)) for label, row in labels]
        column = min(max(NARROWEST, _width(heads)), WIDEST, max(NARROWEST, room // len(heads) - 1))
        shown = max(1, min(len(heads), (room + 1) // (column + 1)))
        title = Text(" " * (side + 3))
        for head in heads[:shown]:
            title.append(_fit(head, column) + " ", style="bold")
        yield title
        for label, row in labels:
            line = Text(f"  {_fit(label, side)} ")
            for group in row[:shown]:
                line.append_text(patch(group, column)).append(" ")
            yield line
        if more:
            yield Text(f"  {more}", style="dim")
        if shown < len(heads):
            yield Text(f"  {len(heads) - shown} more columns do not fit; widen the terminal", style="dim")
        yield self._legend(sizes)

    def _rows(self, cells: Sequence[Cells]) -> tuple[list[tuple[str, Cells]], str]:
        """Labelled rows, and a sentence for what is left out."""
        names = self.names if self.names is not None else [f"client {i}" for i in range(self.plan.clients)]
        if len(names) != self.plan.clients:
            raise ValueError(f"{len(names)} names for a plan of {self.plan.clients} clients; give one name each")
        # BLANK last: in a column the patches come first.
        order = sorted(range(len(cells)), key=lambda i: [(g == BLANK, g) for g in cells[i]])
        if len(cells) <= self.rows:
            return [(str(names[i]), cells[i]) for i in order], ""
        count = Counter(cells[i] for i in order)
        first = {cells[i]: str(names[i]) for i in reversed(order)}
        kept = {row for row, _ in count.most_common(self.rows)}
        labels = [
            (f"{count[row]} like {first[row]}" if count[row] > 1 else first[row], row) for row in count if row in kept
        ]
        left = len(cells) - sum(count[row] for row in kept)
        return labels, f"and {left} clients with {len(count) - len(kept)} other patterns" if left else ""

    def _legend(self, sizes: Sequence[int]) -> Text:
        line = Text()
        for group, size in enumerate(sizes[:12]):
            line.append(", " if group else "")
            line.append(f"{letters(group)}", style=style(group))
            line.append(f" {size}" + (" clients" if group == 0 else ""))
        if len(sizes) > 12:
            line.append(f" and {len(sizes) - 12} more groups")
        if sizes:
            line.append(". The same letter is the same clients; ")
        if any(isinstance(unit, MixedUnit) for unit in self.plan.units.values()):
            line.append("~ is a mixture of its own; ")
        return line.append("blank stays private.")


def groups(plan: Plan) -> tuple[tuple[Cells, ...], list[int]]:
    """For each client its group in each unit, and the size of each group. A group is a set of clients in one circle.

    >>> from fedquilt.sharing import everyone, nobody
    >>> groups(everyone(["a", "b"], [1, 1]) | nobody(["c"], 2))
    (((0, 0, -1), (0, 0, -1)), [2])
    """
    known: dict[tuple[int, ...], int] = {}
    columns: list[list[int]] = []
    for unit in plan.units.values():
        column = [BLANK] * plan.clients
        if isinstance(unit, UnitPlan):
            members: dict[int, list[int]] = {}
            for client, circle in enumerate(unit.circle.tolist()):
                if circle >= 0:
                    members.setdefault(circle, []).append(client)
            for clients in members.values():
                if len(clients) > 1:
                    group = known.setdefault(tuple(clients), len(known))
                    for client in clients:
                        column[client] = group
        else:
            column = [MIXED if receives else BLANK for receives in unit.receives.tolist()]
        columns.append(column)
    return tuple(zip(*columns, strict=True)), [len(clients) for clients in known]


def _alike(heads: list[str], cells: Sequence[Cells]) -> tuple[list[str], list[int]]:
    """Neighbouring units that look the same everywhere as one column: its heads, and which columns stay."""
    columns = list(zip(*cells, strict=True))
    keep = [i for i in range(len(heads)) if i == 0 or columns[i] != columns[i - 1]]
    ends = [*keep[1:], len(heads)]
    spans = zip(keep, ends, strict=True)
    return [heads[a] if b - a == 1 else f"{heads[a]} +{b - a - 1}" for a, b in spans], keep


def _width(heads: Sequence[str]) -> int:
    return min(WIDEST, max(cell_len(head) for head in heads))


def _fit(text: str, width: int) -> str:
    """The text in exactly that width; the end of a long one is kept, as it tells `stage1.conv` from `stage1.norm`."""
    if cell_len(text) > width:
        tail = width // 2
        text = set_cell_size(text, width - 1 - tail) + "…" + text[len(text) - tail :]
    return set_cell_size(text, width)
