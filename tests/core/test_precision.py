"""Training in bfloat16: layers multiply rounded numbers, weights and steps keep all digits."""

from __future__ import annotations

import pytest
import torch
from core_help import ENGINES, Zero, rows_of
from torch import nn

import fedquilt as fq
from fedquilt.methods import FedAvg

CLOSE = 1.0 + 2.0**-9  # nearer to 1 than bfloat16, which has eight digits of two, can tell


def trained(model: type[nn.Module], engine: str, precision: str, lr: float) -> torch.Tensor:
    """The weights of two clients with one sample, labelled 0, after a step."""
    samples = (torch.full((1, 1), CLOSE), torch.tensor([0]))
    clients = [fq.Client(name, model, train=samples, labels=[0, 1]) for name in "ab"]
    training = fq.Training(rounds=1, lr=lr).but({"precision": precision})
    federated = fq.Federation(fq.Scenario("two", clients, training), FedAvg(), engine=engine, device="cpu")
    federated.step(evaluate=False)
    federated.close()
    return rows_of(federated)["a"]


class Ones(nn.Linear):
    def __init__(self) -> None:
        super().__init__(1, 2, bias=False)
        nn.init.ones_(self.weight)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_by_hand(engine: str) -> None:
    # Both classes get 1/2, so the gradient is -x/2 for the label and x/2 for the other; in bfloat16 x is 1.
    assert trained(Zero, engine, "float32", 1.0).tolist() == [CLOSE / 2, -CLOSE / 2]
    assert trained(Zero, engine, "bf16", 1.0).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_and_steps_keep_all_digits(engine: str) -> None:
    # 1 + 2^-13 is no number of bfloat16, so a weight held in it would not have moved.
    moved = trained(Ones, engine, "bf16", 2.0**-12)
    assert moved.dtype == torch.float32
    assert moved.tolist() == [1 + 2.0**-13, 1 - 2.0**-13]


def test_another_name_is_refused() -> None:
    with pytest.raises(ValueError, match="precision 'half' is not known; take float32 or bf16"):
        fq.Training().but({"precision": "half"})
