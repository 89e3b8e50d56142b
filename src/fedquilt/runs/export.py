"""Personal models leave the house: a folder for each client with its model, in formats that others read, and a card.

A card says what the model was trained on, with whom it shared, and how good it is, from what the run wrote down.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedquilt._util.files import write_text
from fedquilt._util.metric import metric_of
from fedquilt._util.plain_values import python
from fedquilt._util.suggest import did_you_mean
from fedquilt.results import Row, final
from fedquilt.runs.checkpoint import Damaged, write_tensors
from fedquilt.runs.folder import ALONE, METRICS, PLANS, SUMMARY, RunFolder
from fedquilt.runs.rebuilding import scenario_of
from fedquilt.runs.saved_models import MODELS, load_model
from fedquilt.runs.settings import method_from
from fedquilt.sharing import MixedUnit, Plan

_NAMED = 12  # clients that a card names of a circle; of the others it says how many


def export(
    folder: str | Path, out: str | Path, clients: Sequence[str] | None = None,
    formats: Sequence[str] = ("safetensors", "pt2"), *, trust: bool = False, tell: Callable[[str], None] | None = None,
) -> list[Path]:  # fmt: skip
    """Write the personal models of a finished run, one folder a client, and give back the folders.

    `formats` are `safetensors` (the weights), `pt2` (`torch.export`: a program that runs without the model's code) and
    `onnx` (which needs `fedquilt[export]`). Each folder has `card.md` for people and `card.json` for machines. `trust`
    is as in `load_model`; `tell` is called with each client's name.
    """
    for name in formats:
        if name not in FORMATS:
            raise ValueError(did_you_mean(name, FORMATS, "format of models"))
    if "onnx" in formats:
        _check_onnx()
    run = _Kept(folder, trust)
    wanted = list(run.entries) if clients is None else [str(python(client)) for client in clients]
    for client in wanted:
        if client not in run.entries:
            raise ValueError(did_you_mean(client, run.entries, f"client in '{folder}'"))
    made = []
    for client in wanted:
        place = Path(out) / _folder_name(client, list(run.entries))
        place.mkdir(parents=True, exist_ok=True)
        model, (shape, kind) = load_model(folder, client, trust=trust), run.input_of(client)
        example = torch.zeros(2, *shape, dtype=kind)
        said = {name: FORMATS[name](model, example, place / f"model.{name}") for name in formats}
        card = run.card(client) | {"input": {"shape": list(shape), "dtype": str(kind).removeprefix("torch.")}}
        card["input"]["columns"] = run.entries[client].get("columns", [])
        card["files"] = {f"model.{name}": told for name, told in said.items()}
        write_text(place / "card.json", json.dumps(card, indent=1) + "\n")
        write_text(place / "card.md", in_words(card))
        made.append(place)
        if tell is not None:
            tell(client)
    return made


class _Kept:
    """What a finished run says of its clients."""

    def __init__(self, folder: str | Path, trust: bool) -> None:
        self.run, self.trust = RunFolder(folder), trust
        self.settings = self.run.read_settings()
        if not self.run.finished:
            raise ValueError(f"the run in '{folder}' is not finished; go on with it first: fedquilt resume {folder}")
        path = self.run.folder / MODELS
        if not path.is_file():
            raise Damaged(f"'{folder}' holds no models; those of a deployed run are on its devices")
        self.entries: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["clients"]
        self.summary = json.loads((self.run.folder / SUMMARY).read_text(encoding="utf-8"))
        self.rows = self.run.lines(METRICS)
        alone = RunFolder(self.run.folder / ALONE)
        self.alone: list[Row] = alone.lines(METRICS) if alone.finished else []
        self.plan = Plan.from_json(self.run.lines(PLANS)[-1])
        self.method = method_from(self.settings["method"], trust)
        self._inputs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def input_of(self, client: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and the type of a sample; runs of earlier versions do not say it, their scenario does."""
        told = self.entries[client].get("input")
        if told is not None:
            return tuple(told["shape"]), getattr(torch, told["dtype"])
        if not self._inputs:
            made = scenario_of(self.settings, self.trust)
            self._inputs = {each.name: (tuple(each.train.x.shape[1:]), each.train.x.dtype) for each in made.clients}
        return self._inputs[client]

    def card(self, client: str) -> dict[str, Any]:
        """What is to be said of a client's model."""
        entry, known = self.entries[client], self.settings
        names = known.get("label_names") or []
        metric = metric_of(self.summary)
        scores = {
            readout: score
            for readout in known["readouts"]
            if (score := _score(self.rows, readout, client, metric.name))
        }
        bar = _score(self.alone, "received", client, metric.name)
        return {
            "client": client,
            "trained_on": {
                "scenario": known["scenario"].get("title", ""),
                "samples": entry["samples"],
                "labels": [names[label] if label < len(names) else label for label in entry["labels"]],
                "traits": entry["traits"],
            },
            "method": {"name": known["method"]["name"], "settings": known["method"].get("settings", {})},
            "seed": known["seed"],
            "rounds": self.summary["rounds"],
            "shared_with": self._shared(known["clients"].index(client)),
            "metric": metric.told(),
            metric.name: scores,
            f"{metric.name}_alone": bar,
            "reported": self.summary["readout"],
            "is_what_was_measured": self.method.predicts is None,
            "made_with": known["versions"],
        }

    def _shared(self, number: int) -> dict[str, list[str]]:
        """With whom each unit is shared: the others of its circle, or those in its mixture."""
        names, found = self.settings["clients"], {}
        for unit, plan in self.plan.units.items():
            if isinstance(plan, MixedUnit):
                others = (plan.matrix[number] > 0).nonzero()[:, 0].tolist()
            else:
                mine = int(plan.circle[number])
                others = (plan.circle == mine).nonzero()[:, 0].tolist() if mine >= 0 else []
            found[unit] = [names[other] for other in others if other != number]
        return found


def _score(rows: Sequence[Row], readout: str, client: str, lead: str) -> dict[str, Any]:
    """A client's last score by split, with how many samples; empty where nothing was measured."""
    found = {}
    for split in ("test", "validation"):
        row = final([row for row in rows if row["client"] == client], readout, split).get(client)
        if row is not None and row.get(lead) is not None:
            found[split] = {lead: row[lead], "samples": row["samples"], "round": row["round"]}
    return found


def in_words(card: Mapping[str, Any]) -> str:
    """A card for people, as Markdown."""
    on, method, metric = card["trained_on"], card["method"], metric_of(card)
    settings = ", ".join(f"{key}={value}" for key, value in method["settings"].items())
    traits = ", ".join(f"{key} {value}" for key, value in on["traits"].items())
    how = f"`{method['name']}`" + (f" ({settings})" if settings else "")
    length = f"{card['rounds']} rounds, seed {card['seed']}"
    lines = [
        f"# Model of {card['client']}",
        "",
        f"Trained by fedquilt with the method {how} on the scenario *{on['scenario']}*: {length}.",
        "",
        "## What it was trained on",
        "",
        f"{on['samples']} samples of this client alone, of the labels {', '.join(map(str, on['labels']))}."
        + (f" It declares: {traits}." if traits else "")
        + f" A sample has the shape {tuple(card['input']['shape'])}, {card['input']['dtype']}.",
        "",
        *_columns(card["input"].get("columns", [])),
        "## With whom it shared",
        "",
        "| unit | shared with |",
        "|---|---|",
        *(f"| `{unit}` | {_names(others)} |" for unit, others in card["shared_with"].items()),
        "",
        "## How good it is",
        "",
        f"| predicting with | split | {metric.heading} | samples | after round |",
        "|---|---|---|---|---|",
    ]
    bar = card[f"{metric.name}_alone"]
    scores = {**card[metric.name], **({"alone": bar} if bar else {})}
    for readout, by_split in scores.items():
        for split, told in by_split.items():
            cells = (readout, split, metric.show(told[metric.name]), str(told["samples"]), str(told["round"]))
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        _which(card),
        "",
        "## Files",
        "",
        *(f"- `{name}`: {told}" for name, told in card["files"].items()),
        "",
    ]
    return "\n".join(lines)


def _columns(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the numbers of a sample are, where they are columns of a table."""
    if not columns:
        return []
    keys = [key for key in ("filled with", "mean", "deviation") if key.replace(" ", "_") in columns[0]]
    scaled = " A model is given (value - mean) / deviation." if "mean" in keys else ""
    rows = [
        f"| {number} | `{column['name']}` | "
        + "".join(f"{column[key.replace(' ', '_')]:g} | " for key in keys).rstrip()
        for number, column in enumerate(columns, 1)
    ]
    head = ["number", "column", *keys]
    return [
        f"Its numbers are columns of a table, in this order.{scaled}",
        "",
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *rows,
        "",
    ]


def _which(card: Mapping[str, Any]) -> str:
    """Which of the scores is that of the model in the folder."""
    if card["is_what_was_measured"]:
        told = "The model here is `received`: the client's model with what was shared in the last round installed."
    else:
        told = (
            f"The method `{card['method']['name']}` predicts with more than the model here, so none of these scores is "
            "quite the model's own."
        )
    return told + (
        " `alone` is the same client trained by itself, as long." if card[f"{metric_of(card).name}_alone"] else ""
    )


def _names(others: Sequence[str]) -> str:
    if not others:
        return "nobody: it never left the client"
    more = len(others) - _NAMED
    return ", ".join(others[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _folder_name(client: str, everybody: Sequence[str]) -> str:
    """A client's name as a folder's; with its number where two would have the same."""
    plain = [
        "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".") or "client" for name in everybody
    ]
    at = everybody.index(client)
    same = [name.lower() for name in plain].count(plain[at].lower()) > 1
    return f"{plain[at]}-{at}" if same else plain[at]


# --- formats ----------------------------------------------------------------------------------------------------------


def _safetensors(model: nn.Module, example: Tensor, path: Path) -> str:
    write_tensors(path, model.state_dict())
    return "the weights; `load_state_dict` takes what `safetensors.torch.load_file` reads"


def _program(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts of PyTorch that the model's author may use
        return torch.export.export(model, (example,), dynamic_shapes=({0: torch.export.Dim.AUTO},))


def _sizes(run: Callable[[Tensor], Any], example: Tensor) -> str:
    """Which batches something takes: tried, since models may hold on to the size that they were traced with."""
    try:
        run(torch.cat([example, example[:1]]))
    except Exception:
        return "batches of 2 samples"
    return "batches of any size"


def _pt2(model: nn.Module, example: Tensor, path: Path) -> str:
    program = _program(model, example)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.export.save(program, path)
    return f"a program for `torch.export.load`, with {_sizes(program.module(), example)}"


def _onnx(model: nn.Module, example: Tensor, path: Path) -> str:
    # it names every operator of a package that is not installed, whether the model has one or not
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = torch.onnx.export(_program(model, example), dynamo=True, verbose=False)
        assert made is not None
        made.save(path)
    return f"for ONNX, with {_sizes(_program(model, example).module(), example)}"


def _check_onnx() -> None:
    try:
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"onnx needs '{error.name}': pip install 'fedquilt[export]'") from error


FORMATS: dict[str, Callable[[nn.Module, Tensor, Path], str]] = {"safetensors": _safetensors, "pt2": _pt2, "onnx": _onnx}
