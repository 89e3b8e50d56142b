"""Settings that would do nothing are refused before work, so that nobody takes for tried what was not."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.attacks import Attack
from fedquilt.core.compressed import settings_of
from fedquilt.core.merge_rules import called
from fedquilt.core.server import Server
from fedquilt.sharing import Compression, MixedUnit, Plan
from fedquilt.sharing.merge import Mean


def check_idle(server: Server, attack: Attack | None, simulated: bool) -> None:
    """Refuse settings of what is shared where nothing is. A server half that learns may share later what it does not
    share yet; and devices are set up with secure sums, whatever is run on them."""
    method, rule, privacy, compress = server.method, server.rule, server.privacy, server.compress
    if method.learns:
        return
    shared, idle = _shared(server.plan), []
    if not shared and not isinstance(rule, Mean):
        idle.append(f"the merge {called(rule)}")
    if not shared and attack is not None:
        idle.append(f"the attack '{attack.name}'")
    if not shared and privacy is not None and privacy.level != "sample":
        idle.append(f"dp.level={privacy.level}")
    if not shared and simulated and server.secure is not None:
        idle.append("secure sums")
    parameters = any(member.parameters.get(unit, 0) for unit in shared for member in server.roster.members)
    if not parameters and compress != Compression():
        idle.append(settings_of(compress))
    if idle:
        raise ValueError(
            f"{' and '.join(idle)} would do nothing: clients of the method '{method.name}' share "
            f"{'no parameters' if shared else 'nothing'} here; leave it out, or take a method that does"
        )


def _shared(plan: Plan) -> Sequence[str]:
    """The units that anybody shares, be it in a circle that nobody else has joined yet."""
    units = plan.units.items()
    inside = {u for u, each in units if not isinstance(each, MixedUnit) and bool((each.circle >= 0).any())}
    return [unit for unit in plan.units if unit in inside or bool(plan.sends(unit).any())]
