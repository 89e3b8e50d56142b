"""What counts as another model: what changes the function it computes, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedquilt.runs.code_digest import code_of

MODEL = '''
import torch
from torch import nn

SLOPE = 0.1
MASK = torch.tensor([1.0, 0.0])

def bend(x, by={"leak": 2}):
    return torch.where(x > 0, x, SLOPE * x) * MASK

class Base(nn.Module):
    made = 0
    gain = 1.0

    def __init__(self):
        super().__init__()
        Base.made += 1
        self.layer = nn.Linear(2, 2)
        self.names = {"b", "a"}

class Net(Base):
    """A network."""

    def forward(self, x):
        inner = lambda y: bend(y) + 1
        return inner(self.layer(x)) * self.gain if x in (1, 2) else x
'''


def read(text: str) -> str:
    module = ModuleType("someones_models")
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, "someones_models.py", "exec", dont_inherit=True), vars(module))
        return code_of(module.Net, module.Net())
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("bend(y) + 1", "bend(y) + 2"),
        ("x > 0, x", "x >= 0, x"),
        ("SLOPE = 0.1", "SLOPE = 0.2"),
        ("[1.0, 0.0]", "[0.0, 1.0]"),
        ('"leak": 2', '"leak": 3'),
        ("gain = 1.0", "gain = 2.0"),
        ("nn.Linear(2, 2)", "nn.Linear(2, 2, bias=False)"),
        ('{"b", "a"}', '{"b", "c"}'),
        ("(1, 2)", "(1, 3)"),
        ("class Net(Base)", "class Net(nn.Module)"),
    ],
)
def test_what_a_model_computes_counts(old: str, new: str) -> None:
    assert old in MODEL
    try:
        changed = read(MODEL.replace(old, new))
    except AttributeError:  # without its base it has no layer
        changed = ""
    assert changed != read(MODEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A network."""', '"""Another word for it."""'),
        ("    def forward", "    # a comment\n\n    def forward"),
        ("made = 0", "made = 7"),  # a counter that the class itself writes to
        ("import torch\n", "import torch\nimport math\n"),
    ],
)
def test_what_it_does_not_compute_does_not(old: str, new: str) -> None:
    assert old in MODEL
    assert read(MODEL.replace(old, new)) == read(MODEL)


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "someones_models.py").write_text(MODEL)
    script = (
        "import someones_models as m; from fedquilt.runs.code_digest import code_of; print(code_of(m.Net, m.Net()))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        ).stdout.strip()
        for seed in ("1", "2")  # the second one reads what the first compiled
    }  # fmt: skip
    assert said == {read(MODEL)}
