"""Decisions about who shares a unit: by what clients said in a ballot, or by a look where none could judge.

A decision is a dict of numbers and texts, so that it is kept with a run as it is: `unit`, `round`, `changed`,
`backwards` (whether circles were to be joined), `circles` before and after, `gain` in nats of validation loss (or in
squared steps, by a look) with its `error`, by how many errors it is `sure` (counted as of many clients), `why`, what
was `rejected`, and where nothing was changed although there was a gain, what was missing (`but`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedquilt.methods.hypotheses import Seen, of_group, tidy
from fedquilt.sharing import PRIVATE
from fedquilt.sharing.evidence import Gain, costs, pooled

Decision = dict[str, Any]
Ballot = Mapping[str, Any]
_ONCE = 2.0  # standard errors that a single test needs; a split is the best of many, and needs `sure` of them
_AS_GOOD = 0.95  # of the best gain: for less, nobody parts
_LASTING = 3 / 4  # of an earlier gain
_LEAST = 10  # validation samples of a half, of all clients together, below which nobody judges
_UNJUDGED = ", nobody to judge"
RECEIVED, OWN = 0, -1  # the places among a ballot's losses of what was received and of a client's own copy


def judged(samples: Tensor, who: Tensor | slice = slice(None)) -> bool:
    """Whether some clients have enough validation samples on either half, of (K, 2)."""
    return bool((samples[who].sum(0) >= _LEAST).all())


def circles_of(circle: Tensor) -> list[tuple[int, Tensor]]:
    """The circles of a unit, and who is in each, (K,)."""
    return [(group, circle == group) for group in circle[circle != PRIVATE].unique().tolist()]


def by_ballot(
    asked: Ballot,
    circle: Tensor,
    round_: int,
    sure: float,
    before: Sequence[Decision] = (),
    blind: Tensor | None = None,
) -> tuple[Tensor, list[Decision]]:
    """(K,) the circles of a unit after a ballot, and what was decided of each circle that is not `blind`, (K,).

    Taken is the hypothesis of the fewest circles among those that are as good as the best one (within a standard error,
    or a twentieth of its gain), if its losses are lower by `sure` standard errors than with what all of them share, on
    either half of the samples too, and either

    - by two lower than with each client's own copy as well: what a client can do for itself is no reason to part; or
    - not higher than that, in circles of two or more in the mean, and the gain lasts: three quarters of what an earlier
      ballot (among `before`) found are left. Clients that merely have other labels gain by parting while the model is
      young, and no longer when it has learnt.
    """
    new, made = circle.clone(), []
    options = dict(zip(asked["names"], asked["circles"], strict=False))
    for _, members in circles_of(circle):
        if blind is not None and bool(blind[members].any()):
            continue
        known = [d["gain"] for d in before if d["unit"] == asked["unit"] and d["members"] == _names(members)]
        decision, taken = _split(asked, members, options, sure, max(known, default=torch.inf))
        if decision:
            made.append({"unit": asked["unit"], "round": round_, "backwards": False} | decision)
            if taken is not None:
                new = torch.where(members, torch.where(taken == PRIVATE, PRIVATE, taken + int(new.max()) + 1), new)
    if not any(decision["changed"] for decision in made):
        for name in asked["back"]:
            grouping = asked["circles"][len(asked["names"]) + asked["back"].index(name)]
            for after in grouping[grouping != PRIVATE].unique().tolist():
                members = grouping == after
                if len(new[members].unique()) > 1 or bool((new[members] == PRIVATE).any()):
                    decision = _join(asked, members, name, circle)
                    made.append({"unit": asked["unit"], "round": round_, "backwards": True} | decision)
                    if decision["changed"]:
                        new = torch.where(members, int(new.max()) + 1, new)
    return _kept(tidy(new), circle), made


def _split(
    asked: Ballot, members: Tensor, options: Mapping[str, Tensor], sure: float, earlier: float
) -> tuple[Decision, Tensor | None]:
    """Whether a circle is split, and how."""
    here = {n: g for n, g in options.items() if len(_kinds(g[members])) > 1 or bool((g[members] == PRIVATE).any())}
    if not here:
        return {}, None
    at = {name: _candidate(asked, name) for name in here}
    best = min(here, key=lambda name: -_gain(asked, members, at[name]).mean)
    good = [name for name in here if name == best or _as_good(asked, members, at[name], at[best])]
    pick = min(good, key=lambda name: len(_kinds(here[name][members])))
    shared, alone = (_gain(asked, members, at[pick], than=than) for than in (RECEIVED, OWN))
    halves = [_gain(asked, members, at[pick], half).mean for half in (0, 1)]
    lasts = shared.mean >= _LASTING * earlier and alone.mean + alone.error > 0
    lasts = lasts and 2 * len(_kinds(here[pick][members])) <= int(members.sum())
    missing = {
        f"{sure:g} errors are needed": shared.sure > sure,
        "on one half of the validation samples there is no gain": min(halves) > 0,
        "each client's own copy may do as well, and it is not seen that the gain lasts": alone.sure > _ONCE or lasts,
    }
    changed = all(missing.values())
    others = {name: _gain(asked, members, place) for name, place in at.items() if name != pick}
    return {
        "changed": changed,
        "why": pick,
        "clients": int(members.sum()),
        "circles": [1, len(_kinds(here[pick][members]))],
        "gain": shared.mean,
        "error": shared.error,
        "sure": shared.sure,
        "but": next((but for but, met in missing.items() if not met), "") if shared.mean > 0 else "",
        "gain_over_own": alone.mean,
        "error_over_own": alone.error,
        "members": _names(members),
        "rejected": _table(others | {"each by itself": _gain(asked, members, OWN)}),
    }, here[pick] if changed else None


def _join(asked: Ballot, members: Tensor, name: str, circle: Tensor) -> Decision:
    """Whether some circles become one again: all samples speak, as there is one hypothesis."""
    gain = _gain(asked, members, _candidate(asked, name))
    return {
        "changed": gain.sure > _ONCE,
        "why": name,
        "clients": int(members.sum()),
        "circles": [len(_kinds(circle[members])), 1],
        "members": "",
        "gain": gain.mean,
        "error": gain.error,
        "sure": gain.sure,
        "but": f"{_ONCE:g} errors are needed" if 0 < gain.sure <= _ONCE else "",
        "rejected": [],
    }


def by_look(
    unit: str, options: Mapping[str, Tensor], circle: Tensor, of: Tensor, seen: Seen, samples: Tensor, lam: float,
    round_: int, sure: float,
) -> tuple[Tensor, list[Decision]]:  # fmt: skip
    """(K,) the circles after a look alone, of which those in `of` are decided about: the first hypothesis, by what its
    circles save of the expected cost."""
    name, grouping = next(iter(options.items()), ("", circle))
    new, made = circle.clone(), []
    for _, members in circles_of(of):
        who = (members & (seen["times"] > 0)).nonzero()[:, 0]
        if len(who) < 2 or (len(_kinds(grouping[who])) == 1 and not bool((grouping[who] == PRIVATE).any())):
            continue
        found, parts = of_group(seen, who), torch.where(grouping[who] == PRIVATE, -2 - who, grouping[who])
        saved = costs(found, samples[who], circle[who], lam) - costs(found, samples[who], parts, lam)
        gain = pooled(saved, torch.ones_like(saved))
        changed = gain.sure > sure
        if changed:
            new[who] = torch.where(grouping[who] == PRIVATE, PRIVATE, grouping[who] + int(new.max()) + 1)
        made.append({
            "unit": unit, "round": round_, "backwards": False, "changed": changed, "why": name + _UNJUDGED,
            "clients": len(who), "circles": [1, len(_kinds(grouping[who]))], "members": "", "gain": gain.mean,
            "error": gain.error, "sure": gain.sure, "rejected": [],
            "but": f"{sure:g} errors are needed" if 0 < gain.sure <= sure else "",
        })  # fmt: skip
    return _kept(tidy(new), circle), made


def moved(client: str, round_: int, gain: float, error: float) -> Decision:
    """A client took the patch that fits it best."""
    return {
        "unit": "", "round": round_, "backwards": False, "changed": True, "why": f"{client} took the patch of others",
        "clients": 1, "circles": [1, 1], "members": "", "gain": gain, "error": error,
        "sure": gain / max(error, 1e-12), "but": "", "rejected": [],
    }  # fmt: skip


def in_words(decision: Decision) -> str:
    """A decision as a sentence."""
    unit, (before, after), gain = decision["unit"], decision["circles"], decision["gain"]
    measure = "" if decision["why"].endswith(_UNJUDGED) else " nats"
    evidence = f"{gain:.3g}{measure} (evidence: {decision['sure']:.1f} standard errors)"
    if not unit:
        return f"round {decision['round']}: {decision['why']}, which lowers its loss by {evidence}"
    evidence += f", but {decision['but']}" if decision["but"] else ""
    who = f"unit {unit}, {decision['clients']} clients"
    if decision["backwards"]:
        word = "joined in one circle" if decision["changed"] else f"left in {before} circles"
        return f"round {decision['round']}: {who}, {word}: joining would gain {evidence}"
    tried = "; ".join(f"{each['name']} {each['gain']:.3g} ± {each['error']:.2g}" for each in decision["rejected"])
    tail = f"; rejected: {tried}" if tried else ""
    if decision["changed"]:
        return (
            f"round {decision['round']}: {who}, split in {after} circles by {decision['why']}: sharing it with all of "
            f"them would cost {evidence}{tail}"
        )
    return f"round {decision['round']}: {who}, shared as before: {decision['why']} would gain {evidence}{tail}"


def nothing_split(made: Sequence[Decision], sure: float, looked: bool) -> str:
    """Why a run's plan is as it was at first, and what to try.

    >>> nothing_split([], sure=3.0, looked=False)
    'Nothing was split: the run was too short to look. fedquilt advise says whether another method does better.'
    """
    best = max(made, key=lambda decision: decision["sure"], default=None)
    if best is None:
        why = "what clients measured spoke for no other circles" if looked else "the run was too short to look"
    elif best["sure"] <= sure:
        why = f"sharing with everyone was never worse by more than its error, {sure:g} standard errors"
    else:
        why = f"sharing with everyone was worse by {best['sure']:.1f} standard errors, but {best['but']}"
    return f"Nothing was split: {why}. fedquilt advise says whether another method does better."


def _candidate(asked: Ballot, name: str) -> int:
    """The place of a hypothesis among a ballot's losses."""
    return 1 + [*asked["names"], *asked["back"]].index(name)


def _gain(asked: Ballot, members: Tensor, candidate: int, half: int | None = None, than: int = RECEIVED) -> Gain:
    """By how much the loss of some clients is lower with a candidate, on one half of the samples or on all."""
    losses, counts = asked["losses"][members], asked["judged"][members]
    gains = losses[:, :, than] - losses[:, :, candidate]  # (k, 2)
    if half is not None:
        return pooled(gains[:, half], counts[:, half])
    return pooled((gains * counts).sum(1) / counts.sum(1).clamp(min=1), counts.sum(1))


def _as_good(asked: Ballot, members: Tensor, candidate: int, best: int) -> bool:
    """Whether a candidate is within a standard error of the best one, or has nearly all of its gain."""
    less = _gain(asked, members, best, than=candidate)
    return less.mean <= less.error or less.mean <= (1 - _AS_GOOD) * _gain(asked, members, best).mean


def _kinds(groups: Tensor) -> list[int]:
    """The circles of some clients, each private one a circle of its own."""
    return [g for g in groups.unique().tolist() if g != PRIVATE] + [PRIVATE] * int((groups == PRIVATE).sum())


def _names(members: Tensor) -> str:
    """Some clients' numbers as a text, to know them by."""
    return ",".join(str(i) for i in members.nonzero()[:, 0].tolist())


def _table(gains: Mapping[str, Gain]) -> Sequence[dict[str, Any]]:
    return [{"name": name, "gain": gain.mean, "error": gain.error} for name, gain in gains.items()]


def _kept(new: Tensor, circle: Tensor) -> Tensor:
    """(K,) the new circles, under their old numbers where the members are the same."""
    numbers: dict[int, int] = {}
    free = int(circle.max()) + 1
    for group in new[new != PRIVATE].unique().tolist():
        old = set(circle[new == group].tolist())
        same = len(old) == 1 and bool(((circle == next(iter(old))) == (new == group)).all())
        numbers[group] = next(iter(old)) if same else free
        free += not same
    return torch.tensor([PRIVATE if g == PRIVATE else numbers[g] for g in new.tolist()])
