"""From run directories to what the page draws: runs grouped by method, curves over seeds, clients, plans, traffic.

Everything heavy is aggregated here and packed as typed arrays, so that the page stays small and only draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt._util.wording import flat
from fedquilt.report.advice import ADVICE
from fedquilt.report.comparison_data import ALONE, Group, at_rounds, known_mean, placed, view_data
from fedquilt.report.plan_frames import frames, packed, small
from fedquilt.report.read_runs import Reading, RunFiles, read_run, run_folders, settings_tried
from fedquilt.report.run_texts import json_of, text_of
from fedquilt.report.sample_clients import shown, some_clients


def page_data(
    run_dirs: Iterable[str | Path],
    *,
    title: str | None = None,
    reference: str | None = None,
    target: float | None = None,
) -> dict[str, Any]:
    """All that the page shows, ready for `json.dumps`."""
    run_dirs = list(run_dirs)
    runs = [read_run(folder) for given in run_dirs for folder in run_folders(given)]
    if not runs:
        raise ValueError("a report needs at least one run directory")
    names = list(dict.fromkeys(run.scenario for run in runs))
    scenarios = [scenario_data(name, [r for r in runs if r.scenario == name], reference, target) for name in names]
    tried = [one for given in run_dirs for one in settings_tried(given)]
    return {
        "title": title or ", ".join(names),
        "scenarios": scenarios,
        "tried": tried,
        "advice": [advised(d) for d in run_dirs],
    }


def advised(folder: str | Path) -> dict[str, list[str]]:
    """What `fedquilt advise` said of the runs that a directory holds; nothing where it was not asked."""
    path = Path(folder) / ADVICE
    told = json_of(path, text_of(path))
    return {key: [str(word) for word in told.get(key) or []] for key in ("sentences", "next")}


def grouped(runs: Sequence[RunFiles]) -> list[Group]:
    """Runs of a scenario by method; where one method ran with several settings, the name tells them apart.

    Of two runs with the same method, settings and seed the later one counts.
    """
    found: dict[tuple[str, str], Group] = {}
    kept: dict[tuple[str, str], dict[str, Any]] = {}
    for run in runs:
        settings = dict(_settings(run))
        key = (run.method, repr(sorted(settings.items())))
        group = found.setdefault(key, Group(run.method))
        kept[key] = settings
        group.runs = sorted([r for r in group.runs if r.seed != run.seed] + [run], key=lambda r: r.seed)
    for method in {key[0] for key in found}:
        rivals = [key for key in found if key[0] == method]
        if len(rivals) > 1:
            names = sorted({n for key in rivals for n in kept[key]})
            differing = [n for n in names if len({repr(kept[key].get(n)) for key in rivals}) > 1]
            for key in rivals:
                short = {n: n.removesuffix(".name").rpartition(".")[2] for n in differing}
                told = ", ".join(f"{short[n]}={kept[key][n]}" for n in differing if n in kept[key])
                found[key].name = f"{method} ({told or 'defaults'})"
    return list(found.values())


def scenario_data(name: str, runs: Sequence[RunFiles], reference: str | None, target: float | None) -> dict[str, Any]:
    """One scenario's part of the page."""
    groups = grouped(runs)
    everyone = list(dict.fromkeys(c for run in runs for c in run.clients))
    clients = shown(runs, everyone)  # one by one; curves and tables are of everyone
    some = [Group(group.name, [some_clients(run, clients) for run in group.runs]) for group in groups]
    all_readings = dict.fromkeys(r for run in runs for r in (run.reading, *run.series) if r[0] != ALONE[0])
    readings: list[Reading | None] = [None, *(all_readings if len(all_readings) > 1 else ())]
    classes = max((m.shape[0] for run in runs for m in run.confusion.values()), default=0)
    labels = next((list(run.labels) for run in runs if run.labels), [])
    return {
        "name": name,
        "clients": clients,
        "metric": runs[0].metric.told() | {"heading": runs[0].metric.heading},
        "everyone": len(everyone),
        "classes": classes > 0 or any(s.f_by_class is not None for run in runs for s in run.series.values()),
        "labels": labels + [str(i) for i in range(len(labels), classes)],
        "alarms": [f"{g.name}, seed {r.seed}: {told}" for g in groups for r in g.runs for told in said(r, "alarms")],
        "methods": [{"name": g.name, "seeds": [r.seed for r in g.runs]} for g in groups],
        "views": [view_data(groups, clients, reading, reference, target) for reading in readings],
        "details": [client_details(g, clients) for g in some],
        "quilts": quilts(some, clients),
        "traffic": [client_traffic(g, clients) for g in some],
        "runs": [run_facts(g, r) for g in groups for r in g.runs],
    }


def client_details(group: Group, clients: Sequence[str]) -> dict[str, Any]:
    """Per client, means over seeds: its score over rounds, F-measure by class, and the confusion summed over seeds."""
    mine = [(run, series) for run in group.runs if (series := run.series.get(run.reading))]
    told: dict[str, Any] = {"rounds": [], "history": None, "f": None, "confusion": None}
    if mine:
        rounds = sorted({at for _, series in mine for at in series.rounds})
        rounds = [rounds[i] for i in np.unique(np.linspace(0, len(rounds) - 1, 200).astype(int))]
        curves = [placed(at_rounds(s.rounds, s.filled(), rounds).T, run, clients) for run, s in mine]
        history = known_mean(np.stack(curves))  # (clients, rounds)
        told["rounds"] = rounds
        small_shares = np.where(np.isnan(history), 65535, np.round(history * 65534))
        shares = mine[0][0].metric.percent  # from 0 to 1: half the room is enough
        told["history"] = packed(small_shares.astype(np.uint16) if shares else history.astype(np.float32))
        by_class = [placed(s.f_by_class, run, clients) for run, s in mine if s.f_by_class is not None]
        if by_class and len({f.shape for f in by_class}) == 1:
            told["f"] = packed(known_mean(np.stack(by_class)).astype(np.float32))
    classes = max((m.shape[0] for run in group.runs for m in run.confusion.values()), default=0)
    if classes:
        total = np.zeros((len(clients), classes, classes), dtype=np.int64)
        number = {c: i for i, c in enumerate(clients)}
        for run in group.runs:
            for client, matrix in run.confusion.items():
                if client in number:
                    total[number[client], : len(matrix), : len(matrix)] += matrix
        flat = total.reshape(len(clients), -1)
        rows, places = np.nonzero(flat)
        told["confusion"] = {
            "classes": classes,
            "offsets": packed(np.searchsorted(rows, np.arange(len(clients) + 1)).astype(np.uint32)),
            "places": packed(small(places)),
            "counts": packed(small(flat[rows, places])),
        }
    return told


def quilts(groups: Sequence[Group], clients: Sequence[str]) -> list[dict[str, Any]]:
    """One quilt a run; when there are many cells, only the first seed of each method has one."""
    runs = [(i, run) for i, g in enumerate(groups) for run in g.runs if run.plans]
    cells = sum(len(run.plans) * len(run.plans[-1][1]) * len(run.clients) for _, run in runs)
    if cells > 4_000_000:
        firsts = dict(reversed(runs))
        runs = [(i, run) for i, run in runs if firsts[i] is run]
    number = {c: i for i, c in enumerate(clients)}
    found = []
    for method, run in runs:
        drawn = frames(run.plans, len(run.clients), most=6_000_000 // max(1, len(runs)))
        if drawn is not None:
            last = max([run.plans[-1][0], *(s.rounds[-1] for s in run.series.values())])
            told = {"method": method, "seed": run.seed, "clients": [number[c] for c in run.clients], "last": last}
            told |= {what: said(run, what) for what in ("changes", "decisions")}
            found.append(told | {"unsplit": str(run.summary.get("nothing_split", ""))} | drawn)
    return found


def said(run: RunFiles, what: str) -> list[str]:
    """Sentences of a run's summary: how its method came to its plan (`changes`, or all `decisions`), or `alarms`."""
    found = run.summary.get(what, [])
    return [str(sentence) for sentence in found] if isinstance(found, list) else []


def client_traffic(group: Group, clients: Sequence[str]) -> dict[str, Any] | None:
    """Megabytes each client sent and received in the whole run, mean over seeds."""
    mine = [run for run in group.runs if run.traffic is not None]
    if not mine:
        return None
    told = {}
    for key in ("up", "down"):
        totals = [placed(getattr(run.traffic, key).sum(axis=0)[:, None], run, clients)[:, 0] for run in mine]
        told[key] = packed(np.nan_to_num(known_mean(np.stack(totals))).astype(np.float32))
    return told


def run_facts(group: Group, run: RunFiles) -> dict[str, Any]:
    """What the list of runs says about one."""
    keys = ("rounds", "epsilon", "megabytes_up", "megabytes_down", "seconds", "virtual_seconds", "engine", "device")
    facts = {key: run.summary[key] for key in keys if isinstance(run.summary.get(key), str | int | float)}
    score = run.summary.get(f"{run.metric.name}_mean")
    facts |= {"score": score} if isinstance(score, float) else {}
    told = [f"{name} = {value}" for name, value in flat(run.settings)]
    return {"folder": run.folder.name, "method": group.name, "seed": run.seed, "facts": facts, "settings": told}


def _settings(run: RunFiles) -> list[tuple[str, Any]]:
    """Settings that make a method another one; not the seed, the machine or the time."""
    own = ("method", "training", "merge", "participation", "settings", "sharing")
    parts = (*own, "attack", "dp", "secure", "compress")
    named = ["method", "method.name"]  # told by the name itself
    if "epsilon" in run.settings.get("dp", {}):
        named.append("dp.noise")  # found for the epsilon
    return [(n, v) for n, v in flat(run.settings) if n.split(".")[0] in parts and n not in named]
