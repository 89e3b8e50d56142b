"""What a run's clients agree on, and the architectures that the server knows them by: from the operator's files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fedquilt._util.toml import values_of
from fedquilt.core.compressed import check as check_compression
from fedquilt.core.privacy_rules import check_method, uses
from fedquilt.core.secure_round import check
from fedquilt.core.terms import Terms
from fedquilt.deploy.device.client_folder import builder
from fedquilt.deploy.held import read_common
from fedquilt.deploy.project import Project
from fedquilt.engines.settings import Training
from fedquilt.methods.find import source_of
from fedquilt.privacy import Privacy, found
from fedquilt.runs.rebuilding import make_method
from fedquilt.runs.rule_texts import rule_from
from fedquilt.sharing import Compression
from fedquilt.tasks import task_from


def make_terms(project: Project, spec: Mapping[str, Any]) -> Terms:
    """What a run's clients agree on, from the project and what was asked for."""
    training = Training(**values_of({**project.spec.training, **spec.get("training", {})}))
    if spec.get("rounds"):
        training = training.but({"rounds": spec["rounds"]})
    if training.deadline or training.arrivals:
        raise ValueError("training settings: deadline and arrivals are of simulations; on devices see [rounds] of "
                         "federation.toml")  # fmt: skip
    method = make_method(spec["method"], values_of(spec.get("settings", {})))
    if "source" in spec and source_of(type(method)) != spec["source"]:
        raise ValueError(
            f"the code of the method '{method.name}' is not that which the run {spec['run']} was begun with; put it "
            "back, or start a new run"
        )
    task = task_from(project.spec.task)
    files = (project.spec.common, project.spec.public_test)
    common, public_test = (read_common(project.folder / file) if file else None for file in files)
    privacy, secure = Privacy.of(spec.get("dp")), project.secure
    rule = rule_from(spec.get("merge") or {"name": "mean"})
    check(secure, method, rule, privacy, ranked=False)
    compress = Compression.of(spec.get("compress"))
    check_compression(compress, method, privacy, secure)
    if privacy is not None:
        check_method(privacy, method, rule, training, ())
        privacy = found(privacy, uses(privacy, training, method.local()), training.rounds)
    seed = spec.get("seed", 0)
    return Terms(method, training, project.spec.classes, seed, common, public_test, privacy, task, secure, compress)


def architecture(project: Project, name: str) -> Callable[[int], Callable[[], nn.Module] | None]:
    """How the server builds a client's model: `architecture(project, name)(0)`, and that of a change by its round."""
    model = project.models.get(name)
    if model is None:
        raise ValueError(f"client '{name}' has no model in federation.toml; give it a table [models.{name}]")

    def build(start: int) -> Callable[[], nn.Module] | None:
        reference = model.get("changes", {}).get(str(start)) if start else model
        return None if reference is None else builder(project.server_folder, reference, name)

    return build
