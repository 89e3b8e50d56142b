"""Settings that would do nothing are refused before work, so that nobody takes for tried what was not."""

from __future__ import annotations

from collections.abc import Sequence

from fedquilt.attacks import Attack
from fedquilt.core.compressed import settings_of
from fedquilt.core.merge_rules import called
from fedquilt.interface.messages import Roster
from fedquilt.interface.method import Method
from fedquilt.privacy import Privacy
from fedquilt.secure import SecureSums
from fedquilt.sharing import Compression, MixedUnit, Plan, Rule
from fedquilt.sharing.merge import Mean


def check_idle(
    method: Method, plan: Plan, roster: Roster, rule: Rule, attack: Attack | None, privacy: Privacy | None,
    secure: SecureSums | None, compress: Compression,
) -> None:  # fmt: skip
    """Refuse settings of what is shared where nothing is. A server half that learns may share later what it does not
    share yet."""
    if method.learns:
        return
    shared, idle = _shared(plan), []
    if not shared and not isinstance(rule, Mean):
        idle.append(f"the merge {called(rule)}")
    if not shared and attack is not None:
        idle.append(f"the attack '{attack.name}'")
    if not shared and privacy is not None and privacy.level != "sample":
        idle.append(f"dp.level={privacy.level}")
    if not shared and secure is not None:
        idle.append("secure sums")
    if compress != Compression() and not any(m.parameters.get(unit, 0) for unit in shared for m in roster.members):
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
