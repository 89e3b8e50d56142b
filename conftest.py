"""Doctests of parts whose extra is not installed are left out."""

from importlib.util import find_spec

EXTRAS = {
    "flwr": "src/fedquilt/deploy/*",
    "plotly": "src/fedquilt/report/figures.py",
}

collect_ignore_glob = [pattern for package, pattern in EXTRAS.items() if find_spec(package) is None]
