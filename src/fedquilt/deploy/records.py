"""What a run over a network leaves behind: an ordinary run directory, line by line as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedquilt.deploy.project import write_atomically, write_toml
from fedquilt.deploy.remote import Exchange, RemoteFederation
from fedquilt.federation import RoundReport
from fedquilt.results import Evaluation, summarise
from fedquilt.sharing import Plan

METRICS, PLANS, TRAFFIC, LETTERS = "metrics.jsonl", "plans.jsonl", "traffic.jsonl", "letters.jsonl"


class Records:
    """The files of one run. `letters.jsonl` is the only one that a simulation does not have: who was asked in each
    exchange, who answered, what was left out and why, and the bytes of the letters."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._plan: Plan | None = None

    def start(self, settings: Mapping[str, Any]) -> None:
        """Writes `run.toml`, for a run that starts."""
        write_toml(self.folder / "run.toml", settings)

    def go_back_to(self, round_: int) -> None:
        """Forgets what came after a round, and the scores of that round, which come with the next one's answers."""
        self._keep(METRICS, lambda line: line["round"] < round_)
        for name in (PLANS, TRAFFIC, LETTERS):
            self._keep(name, lambda line: line["round"] <= round_)
        lines = self._lines(PLANS)
        self._plan = Plan.from_json(lines[-1]) if lines else None

    def round(self, federation: RemoteFederation, report: RoundReport) -> None:
        """Writes a finished round."""
        self.evaluations(report.evaluations)
        if self._plan is None or self._plan != report.plan:
            self._plan = report.plan
            self._write(PLANS, {"round": report.round, **report.plan.to_json()})
        up, down = report.traffic.bytes_up.tolist(), report.traffic.bytes_down.tolist()
        took = report.participants
        self._write(
            TRAFFIC,
            {
                "round": report.round,
                "up": {federation.names[i]: up[i] for i in took},
                "down": {federation.names[i]: down[i] for i in took},
            },
        )

    def evaluations(self, evaluations: tuple[Evaluation, ...]) -> None:
        """Writes scores, one row a client."""
        for evaluation in evaluations:
            self._write(METRICS, *evaluation.rows())

    def letters(self, exchange: Exchange) -> None:
        """Writes what an exchange of letters was."""
        self._write(LETTERS, asdict(exchange))

    def finish(self, federation: RemoteFederation, last: tuple[Evaluation, ...], seconds: float) -> dict[str, Any]:
        """Writes the last scores, the confusion counts and the summary."""
        self.evaluations(last)
        confusion = {
            evaluation.readout: {
                name: counts.tolist() for name, counts in zip(evaluation.clients, evaluation.counts, strict=True)
            }
            for evaluation in last
            if evaluation.split == "test"
        }
        write_atomically(self.folder / "confusion.json", json.dumps(confusion).encode())
        moved = self._lines(TRAFFIC)
        method = federation.method
        readout = method.readout if method.readout in federation.readout_names else federation.readout_names[0]
        summary = {
            "scenario": federation.scenario.name,
            "method": method.name,
            "seed": federation.seed,
            "clients": len(federation.names),
            "rounds": federation.round,
            **summarise(self._lines(METRICS), None, readout),
            "megabytes_up": sum(sum(line["up"].values()) for line in moved) / 1e6,
            "megabytes_down": sum(sum(line["down"].values()) for line in moved) / 1e6,
            "seconds": seconds,
            "engine": "flower",
            "device": "clients",
            "refused_updates": sum(sum(codes.values()) for codes in federation.left_out.values()),
            "left_out": federation.left_out,
        }
        write_atomically(self.folder / "summary.json", json.dumps(summary, indent=2).encode())
        return summary

    def status(self, **what: Any) -> None:
        """Says how the run stands, for whoever follows it."""
        write_atomically(self.folder / "status.json", json.dumps(what).encode())

    def _write(self, name: str, *lines: Mapping[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.is_file():
            return []
        found = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # a line that a kill cut short
                break
        return found

    def _keep(self, name: str, wanted: Callable[[Mapping[str, Any]], bool]) -> None:
        kept = "".join(json.dumps(line) + "\n" for line in self._lines(name) if wanted(line))
        if (self.folder / name).is_file():
            write_atomically(self.folder / name, kept.encode())
