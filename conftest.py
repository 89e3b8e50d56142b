"""One thread a test, and no doctests of parts whose extra is not installed."""

import os
from importlib.util import find_spec

# Before torch is imported: tests fork, and a fork of a process whose OpenMP has started threads hangs at its next use.
os.environ.setdefault("OMP_NUM_THREADS", "1")

EXTRAS = {
    "flwr": "src/fedquilt/deploy/*",
    "plotly": "src/fedquilt/report/figures.py",
}

collect_ignore_glob = [pattern for package, pattern in EXTRAS.items() if find_spec(package) is None]
