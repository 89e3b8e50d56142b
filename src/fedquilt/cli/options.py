"""The options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from fedquilt.cli.output import Refused

Scenario = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A name (fedquilt list scenarios), file.py:function, or a csv or npz.")
]
MethodName = Annotated[
    str | None, typer.Argument(metavar="METHOD", help="A name (fedquilt list methods), or path/to/file.py:Class.")
]
ScenarioOrConfig = Annotated[
    str,
    typer.Argument(
        metavar="SCENARIO",
        help="A name (fedquilt list scenarios), file.py:function, a csv or npz, or a run as .toml or .yaml.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Argument(metavar="METHOD...", help="Names (fedquilt list methods), path/to/file.py:Class, or all."),
]
Rounds = Annotated[
    int | None, typer.Option("--rounds", "-r", metavar="N", help="Rounds; the scenario says how many otherwise.")
]
Seed = Annotated[int, typer.Option("--seed", "-s", metavar="N", help="Everything random follows from it.")]
Seeds = Annotated[int, typer.Option("--seeds", metavar="N", help="How many seeds, counted on from --seed.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE...", help="Settings of the scenario, the method, training or the merge."),
]
Readouts = Annotated[
    str | None, typer.Option("--readouts", metavar="NAME,...", help="Ways to predict (fedquilt list readouts).")
]
Merge = Annotated[str, typer.Option("--merge", metavar="NAME", help="How copies become one (fedquilt list merges).")]
Attack = Annotated[
    str | None, typer.Option("--attack", metavar="NAME", help="Some clients lie (fedquilt list attacks).")
]
Liars = Annotated[
    float | None, typer.Option("--liars", metavar="SHARE", help="The share of clients that lie; 0.2 otherwise.")
]
SecureSums = Annotated[
    bool, typer.Option("--secure-sums", help="The server gets sums of circles and nobody's copy; --set secure.KEY=...")
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="auto, vectorised, compiled, captured, parallel-stacks, parallel or sequential.",
    ),
]
AtOnce = Annotated[
    int | None, typer.Option("--clients-at-once", metavar="N", help="Clients stacked at once; found out otherwise.")
]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Threads of PyTorch; what is good now is found out otherwise."),
]
Everyone = Annotated[
    bool, typer.Option("--everyone", help="At the end try every client's model on everyone's test data too.")
]
Unseen = Annotated[
    int, typer.Option("--unseen", metavar="N", help="Hold N clients out; they join at the end, as newcomers.")
]
Every = Annotated[int, typer.Option("--evaluate-every", metavar="N", help="Measure every N rounds, and at the end.")]
Checkpoints = Annotated[
    int, typer.Option("--checkpoint-every", metavar="N", help="Keep the state every N rounds, to resume from.")
]
Watch = Annotated[
    int | None,
    typer.Option("--watch", metavar="[PORT]", help="Serve the page while it runs, to this machine only."),
]
Alone = Annotated[bool, typer.Option("--alone/--no-alone", help="Train the clients alone too: the bar to clear.")]
Trust = Annotated[bool, typer.Option("--trust", help="Run code that DIR names, also if you never ran it here.")]
AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on standard output, for machines.")]


def lying(settings: list[str] | None, attack: str | None, liars: float | None) -> list[str]:
    """The settings, with the share of liars among them."""
    said = [word for word in settings or () if word.partition("=")[0] in ("liars", "attack.liars")]
    if liars is not None and attack is None:
        raise Refused(f"--liars {liars:g}: say how they lie, as in --attack sign-flip (fedquilt list attacks)")
    if liars is not None and said:
        raise Refused(f"--liars {liars:g} and --set {said[-1]} are both given; give one of them")
    return [*(settings or ()), *([] if liars is None else [f"attack.liars={liars}"])]


def check_checkpoints(every: int) -> None:
    """Refuse a number of rounds that keeps nothing."""
    if every < 1:
        raise Refused(f"--checkpoint-every {every}: give at least 1")
