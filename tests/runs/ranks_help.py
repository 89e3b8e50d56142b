"""Helps tests of ranks: some work in several forked processes that are ranks of each other."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable

import torch

from fedquilt.core.ranks import among, join


def in_ranks(size: int, work: Callable[[], object]) -> list[int]:
    """Do some work in so many forked processes that are ranks of each other; their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                where = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_PORT": port}
                os.environ.update({"MASTER_ADDR": "127.0.0.1", **{key: str(value) for key, value in where.items()}})
                torch.set_num_threads(1)
                with among(join()):
                    work()
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
