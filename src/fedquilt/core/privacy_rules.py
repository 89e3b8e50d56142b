"""What goes together with privacy: which uses of a client are accounted for, and what is refused since it is not.

Whatever leaves a client has to be inside the accounting. Sums of units are; what a method sends beside them, and a plan
that follows from what single clients sent, are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedquilt.client import Client
from fedquilt.engines.settings import Training
from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method
from fedquilt.interface.steps import Do, Send, Step, Train
from fedquilt.privacy import Privacy, Use
from fedquilt.sharing import MixedUnit, Plan, Rule
from fedquilt.sharing.merge import Mean

_OWN = ("train", "validation")  # splits of a client's own


def uses(privacy: Privacy, training: Training, steps: Sequence[Step]) -> Use:
    """How a client, or a sample, is used in a round.

    At the level client a round takes a Poisson sample of the clients. At the others no chance is counted on: the server
    knows who took part. A sample is in one batch of each epoch, so it moves one noisy sum an epoch; that nobody knows
    which one would be worth something too, and is not counted.

    >>> from fedquilt.methods import FedRep
    >>> uses(Privacy(noise=1, level="sample"), Training(epochs=2), FedRep(head_epochs=3).local())
    Use(rate=1.0, times=5)
    """
    if privacy.level == "client":
        return Use(training.share)
    trains = [step for step in steps if isinstance(step, Train) and step.data == "train" and step.when != "tuning"]
    return Use(1.0, sum(step.epochs or training.epochs for step in trains) if privacy.level == "sample" else 1)


def check_method(
    privacy: Privacy, method: Method, rule: Rule, training: Training, clients: Sequence[Client]
) -> None:  # fmt: skip
    """Refuse what cannot be accounted for, before any work."""
    name, level, steps = method.name, f"dp.level={privacy.level}", method.local()

    def refuse(why: str, cure: str) -> None:
        raise ValueError(f"the method '{name}' does not go with {level}: {why}; {cure}")

    most = len(clients) if privacy.level != "sample" else max((client.samples for client in clients), default=0)
    if clients and privacy.delta * most >= 1:
        raise ValueError(
            f"dp.delta={privacy.delta:g} would allow to give away one of {most} "
            f"{'samples' if privacy.level == 'sample' else 'clients'} as it is; give far less than {1 / most:.1g}"
        )
    others = "take one that only sends units, such as fedavg, fedper, ditto or modfl with declared circles"
    beside = [report for step in steps if isinstance(step, Do) for report in step.reports]
    if privacy.level == "sample":
        if any(isinstance(step, Do) and step.data in _OWN for step in steps):
            refuse("its clients compute with their samples outside of the steps that get noise", "take dp.level=client")
        if any(isinstance(step, Train) and step.looks in _OWN for step in steps):
            refuse("its training is given what samples say without noise", "take dp.level=client")
        if any(change.train is not None for client in clients for change in client.changes.values()):
            raise ValueError("dp.level=sample: clients whose samples change in mid-run are not accounted for")
        return
    if beside:
        refuse(f"its clients send reports beside units ('{beside[0]}'), which get no noise", others)
    if privacy.level == "local" and any(isinstance(step, Send) for step in steps):
        refuse("its clients choose what they send, and the choice gets no noise", others)
    if method.learns:
        refuse("its server half finds something in what single clients send, which is a release of its own", others)
    if privacy.level == "local":
        return
    if not isinstance(rule, Mean):
        raise ValueError(
            f"{level} adds noise to sums, and {rule} makes none; merge with 'mean', or take dp.level=local or sample"
        )
    if privacy.level == "client" and training.share < 1 and training.sampling != "poisson":
        raise ValueError(
            f"share={training.share:g} with {level}: that few take part counts only where each client is chosen by "
            "itself; set sampling=poisson"
        )
    if privacy.level == "client" and training.share < 1 and training.deadline:
        raise ValueError(
            f"deadline={training.deadline:g} with {level} and share={training.share:g}: who is in time depends on who "
            "else was chosen, and then chance does not count; leave deadline out, or let all take part (share=1)"
        )
    if privacy.adaptive and training.arrivals:
        raise ValueError(
            f"arrivals={training.arrivals} with dp.adaptive: changes that come late were clipped to what the clip was "
            "then, and noise is of what it is now; leave one of them out"
        )


def check_models(privacy: Privacy, models: Sequence[tuple[Client, nn.Module]]) -> None:
    """Refuse models in which a sample has no gradient of its own."""
    for client, model in models if privacy.level == "sample" else ():
        norm = next((kind for kind in model.modules() if isinstance(kind, nn.modules.batchnorm._BatchNorm)), None)
        if norm is not None:
            raise ValueError(
                f"dp.level=sample: the model of client '{client.name}' has a {type(norm).__name__}, by which a "
                "sample's gradient depends on the others of its batch; use nn.GroupNorm or nn.LayerNorm, or "
                "dp.level=client"
            )


def check_plan(privacy: Privacy, plan: Plan, roster: Roster) -> None:
    """Refuse plans whose units cannot be sent, or merged, with noise."""
    if privacy.level == "sample":
        for member in roster.members:
            if any(member.statistics.values()):
                raise ValueError(
                    f"dp.level=sample: the model of client '{member.name}' writes to buffers while it trains, and "
                    "these get no noise; use a model without, or dp.level=client"
                )
        return
    for unit, planned in plan.units.items():
        sends = plan.sends(unit)
        if not bool(sends.any()):
            continue
        first = int(sends.nonzero()[0])
        member = roster.members[first]
        if member.statistics.get(unit, 0):
            raise ValueError(
                f"unit '{unit}' of client '{member.name}' has running statistics (of a batch norm), which noise would "
                "make useless; keep norms home with the method 'fedbn', or use nn.GroupNorm or nn.LayerNorm"
            )
        deaf = sends & ~planned.receives
        if bool(deaf.any()):
            name = roster.names[int(deaf.nonzero()[0])]
            raise ValueError(f"client '{name}' sends unit '{unit}' and receives none, so its change has no bound")
        if privacy.level == "local":
            continue
        if isinstance(planned, MixedUnit):
            raise ValueError(f"unit '{unit}' is mixed from single copies, and no sum hides them; take dp.level=local")
        if unit in plan.asked:
            raise ValueError(f"unit '{unit}' is asked for by itself, and no sum hides it; take another method")
        small = (planned.members < privacy.smallest) & (senders(planned.row, sends, planned.count) > 0)
        if bool(small.any()):
            size = int(planned.members[small].min())
            raise ValueError(
                f"unit '{unit}' has a circle of {size} clients, and noise would drown it: the least is "
                f"dp.smallest={privacy.smallest}; share it more widely, keep it private, or set dp.smallest"
            )


def senders(row: Tensor, sends: Tensor, circles: int) -> Tensor:
    """(C,) how many clients send to each circle."""
    return torch.bincount(row[sends], minlength=circles)


def signal_to_noise(privacy: Privacy, rate: float, plan: Plan, sizes: Mapping[str, Tensor]) -> float | None:
    """How far a round can move the worst off client's model at most, for each length of the noise that comes with it.

    It follows from the plan alone: a sum of changes of the length clip each, against noise in every number. None where
    nothing is shared.
    """
    noise = torch.zeros(plan.clients, dtype=torch.float64)
    for unit, planned in plan.units.items():
        sends = plan.sends(unit)
        if isinstance(planned, MixedUnit) or not bool(sends.any()):
            continue
        heard = senders(planned.row, sends, planned.count).double()[planned.row]
        # the noise of a circle's mean: one noise over the senders, or one from each of them
        each = 1 / (rate * heard) if privacy.level == "local" else 1 / (rate * heard).square()
        if privacy.level == "distributed":  # where all are honest, there is more than one noise
            each = each / privacy.honest
        noise += torch.where(planned.receives, sizes[unit] * each, 0.0)
    worst = float(noise.max()) ** 0.5 * privacy.found
    return 1 / worst if worst > 0 else None
