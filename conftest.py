"""One thread a test, a GPU only for tests that ask for it, a folder of markers that is nobody's, Ctrl-C also in the
background, and no doctests of parts whose extra is not installed.
"""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec

# Before torch is imported: tests fork, and a fork of a process whose OpenMP has started threads hangs at its next use.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine with a GPU passes the tests that a machine without one passes; `-m gpu` is for the others. Workers, which
# are not told so, inherit it.
if "gpu" in sys.argv:
    os.environ["FEDQUILT_GPU_TESTS"] = "1"
if "FEDQUILT_GPU_TESTS" not in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Tests leave no trace in the folder in which the user's own runs leave markers, nor do they depend on what is there.
if "FEDQUILT_STATE" not in os.environ:
    os.environ["FEDQUILT_STATE"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["FEDQUILT_STATE"], ignore_errors=True)

# What a shell starts in the background ignores Ctrl-C, and so would the commands that tests start and stop by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Nobody cuts the power here: what a killed process has written is there without waiting for a disk, which on some
# machines takes longer than all the rest.
os.fsync = lambda descriptor: None

try:
    from hypothesis import settings

    settings.register_profile("fuzz", max_examples=3000)  # `make fuzz`: tests/fuzz multiply their examples by it
except ModuleNotFoundError:  # without the extra for developers there are still doctests
    pass

EXTRAS = {
    "griffe": "docs/doctests.py",
    "flwr": "*/deploy/*",
    "cryptography": "src/fedquilt/secure/*",
    "triton": "src/fedquilt/layers/*kernels.py",
    "plotly": "src/fedquilt/report/page_content.py",
}

collect_ignore_glob = [pattern for package, pattern in EXTRAS.items() if find_spec(package) is None]
collect_ignore_glob += ["tests/core/interpreted_kernels.py"]  # run by itself, by a test
