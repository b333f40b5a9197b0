"""The runner of all tests with several processes: gloo ranks, forked from a server that has imported PyTorch once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 120.0) -> list[Any]:
    """What ``work(*arguments)`` returns on each of ``size`` ranks; an error's traceback as text in its place."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "sfno_dist"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(r, size, port, queue, work, arguments)) for r in range(size)]
    for process in processes:
        process.start()
    results: list[Any] = ["ended without a result"] * size
    try:
        for process in processes:
            rank, result = queue.get(timeout=seconds)
            results[rank] = result
            del process
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _rank(rank: int, size: int, port: int, queue: Any, work: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        queue.put((rank, work(*arguments)))
    except Exception:
        queue.put((rank, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # the others may still wait for this rank's groups
