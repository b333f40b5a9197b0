"""The runner of all tests with several processes: gloo ranks, forked from a server that has imported all of it once."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from queue import Empty
from typing import Any

import torch
import torch.distributed as dist


def run_ranks(size: int, work: Callable[..., Any], *arguments: Any, living: int | None = None) -> list[Any]:
    """What ``work(*arguments)`` returns on each of ``size`` ranks; an error's traceback as text in its place.

    ``living``: how many of them return anything, where one is to die.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sfno_dist.forecasts", "sfno_dist.training.run"])
    # Kept by this process, as torchrun does, so that it outlives any rank.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = context.Queue()
    processes = [context.Process(target=_rank, args=(r, size, store.port, queue, work, arguments)) for r in range(size)]
    for process in processes:
        process.start()
    results: list[Any] = ["ended without a result"] * size
    try:
        wanted, deadline = size if living is None else living, time.monotonic() + 600
        while wanted and time.monotonic() < deadline:
            alive = any(process.is_alive() for process in processes)
            try:
                rank, result = queue.get(timeout=1)
            except Empty:
                if not alive:  # all have died without a word
                    break
                continue
            results[rank], wanted = result, wanted - 1
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _rank(rank: int, size: int, port: int, queue: Any, work: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=300))
    try:
        queue.put((rank, work(*arguments)))
    except Exception:
        queue.put((rank, traceback.format_exc()))
    queue.close()
    queue.join_thread()
    os._exit(0)  # the others may still wait for this rank's groups
