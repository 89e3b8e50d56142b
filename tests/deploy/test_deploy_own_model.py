"""A model that cannot be built is refused before anything is made, and what cannot be made whole is not left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedquilt.cli import main
from fedquilt.deploy.ops.create import create

NETS = """
from torch import nn
fails, gives, wants, four = lambda: nn.Linear(0.5, 1), lambda: 3, lambda width: nn.Linear(width, 4), 4
"""


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("{tmp}/nets.py:nosuch", "nets.py has no function 'nosuch' to build the model with"),
        ("{tmp}/nets.py:four", "nets.py has no function 'four' to build the model with"),
        ("{tmp}/nets.py:fails", "'fails' of {tmp}/nets.py builds no model: it fails with TypeError: "),
        ("{tmp}/nets.py:gives", "'gives' of {tmp}/nets.py builds no model: it gives an int, not a torch.nn.Module"),
        ("{tmp}/nets.py:wants", "'wants' of {tmp}/nets.py builds no model by itself: give 'width' a default value"),
        ("{tmp}/gone.py:small", "gone.py does not exist"),
        ("nosuch.module:Net", "nosuch.module cannot be imported: ModuleNotFoundError: "),
    ],
)
@pytest.mark.parametrize(
    "words", ["init {tmp}/new --client a --client b --classes 4", "add b --dir {tmp}/fed"], ids=["init", "add"]
)
def test_a_model_that_cannot_be_built_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, model: str, sentence: str
) -> None:
    project = create(tmp_path / "fed", ["a"], "torch.nn:Identity", 2)
    (tmp_path / "nets.py").write_text(NETS)
    before = sorted(tmp_path.rglob("*"))
    written = (project.folder / "federation.toml").read_text()
    assert main(["deploy", *f"{words} --model {model}".format(tmp=tmp_path).split()]) == 2
    said = capsys.readouterr().err.replace("\n", " ")
    assert sentence.format(tmp=tmp_path) in said
    assert "Traceback" not in said
    assert sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts) == before
    assert (project.folder / "federation.toml").read_text() == written


def test_of_a_scenario_that_devices_cannot_have_nothing_stays(tmp_path: Path) -> None:
    """Here its last client's model: by then the first one's folder was there."""
    (tmp_path / "homes.py").write_text(
        "from torch import nn\n\nimport fedquilt as fq\n\n\ndef net():\n    return nn.Linear(2, 2)\n\n\n"
        "def homes():\n    data = ([[0.0, 1.0], [1.0, 0.0]], [0, 1])\n"
        "    return fq.Scenario('homes', [fq.Client('a', net, data), fq.Client('b', lambda: net(), data)])\n"
    )
    assert main(["deploy", "init", str(tmp_path / "fed"), "--scenario", f"{tmp_path}/homes.py:homes"]) == 2
    assert not (tmp_path / "fed").exists()
