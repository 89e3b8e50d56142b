"""Every method of the library passes the checks that users' own methods can be put to."""

from __future__ import annotations

import pytest

from fedquilt.methods import METHODS
from fedquilt.testing import CHECKS, check_method

SETTINGS = {
    "fedmn": {"blocks": (2, 2), "width": 6},
    "feddl": {"interval": 0},
    "feddf": {"steps": 20},
    "fedrep": {"head_epochs": 2},
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("name", METHODS)
def test_check(name: str, check: str) -> None:
    method = METHODS[name](**SETTINGS.get(name, {}))  # type: ignore[arg-type]
    assert check_method(method, only=[check]) == [check]
