"""What processes must hold in common, checked before it can hang them, and which of them was lost when one is."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

if TYPE_CHECKING:
    from sfno_dist.mesh.process_mesh import ProcessMesh

DIGEST_BYTES = 32
NOTE = "sfno_dist/lost"
_LAYOUTS = itertools.count()


class ProcessLostError(RuntimeError):
    """Another process ended, or did not answer in time. Names its rank."""


@torch.compiler.disable
def agree(mesh: ProcessMesh, facts: Mapping[str, object], problem: str | None) -> None:
    """See ``ProcessMesh.agree``. Sends a digest to the first process of the globe, which answers all of them."""
    text = repr((sorted(facts.items()), problem))
    mine = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    fine = torch.zeros(1, dtype=torch.uint8)
    if mesh.place == 0:
        others = torch.empty(mesh.globe_size, DIGEST_BYTES, dtype=torch.uint8)
        others[0] = mine
        _wait(mesh, {place: _receive(mesh, others[place], place) for place in range(1, mesh.globe_size)})
        fine[0] = problem is None and bool((others == mine).all())
        _wait(mesh, {place: _send(mesh, fine, place) for place in range(1, mesh.globe_size)})
    else:
        _wait(mesh, {0: _send(mesh, mine, 0)})
        _wait(mesh, {0: _receive(mesh, fine, 0)})
    if not fine[0]:
        everybody: list = [None] * mesh.globe_size
        mine_in_words = {name: str(value) for name, value in facts.items()}, problem
        dist.all_gather_object(everybody, mine_in_words, group=mesh.groups.control)
        _raise_what_differs(everybody, [mesh.rank_of(place) for place in range(mesh.globe_size)])


def agree_on_layout(facts: Mapping[str, object], problem: str | None, timeout_s: float) -> None:
    """Before there are groups: every process leaves what it holds in the store and reads what the others left.

    The n-th layout of one process is compared with the n-th of each other.
    """
    store, rank = _get_default_store(), dist.get_rank()
    number = next(_LAYOUTS)
    keys = [f"sfno_dist/layout/{number}/{other}" for other in range(dist.get_world_size())]
    store.set(keys[rank], json.dumps([{name: str(value) for name, value in facts.items()}, problem]))
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise ProcessLostError(
            f"process {rank} made a layout of processes within which process {', '.join(missing)} made none within "
            f"{timeout_s:g} s; every process of the program must make the same ProcessMesh"
        ) from error
    _raise_what_differs([tuple(json.loads(text)) for text in store.multi_get(keys)], range(len(keys)))


@contextlib.contextmanager
def naming_the_lost(mesh: ProcessMesh, place: int) -> Iterator[None]:
    """Around each start and each end of a transfer with process ``place`` of the globe: either may find it gone."""
    try:
        yield
    except RuntimeError as error:
        raise _lost(mesh, place, error) from error


def _lost(mesh: ProcessMesh, place: int, error: Exception) -> ProcessLostError:
    """The error for a transfer with process ``place`` of the globe that failed.

    A process that fails ends too and breaks its own transfers, so the first to notice leaves a note for the others.
    """
    peer = mesh.rank_of(place)
    first, noticed_by = peer, mesh.rank
    with contextlib.suppress(Exception):  # the note is lost where the process that kept the store is the lost one
        note = f"{peer},{mesh.rank}"
        first, noticed_by = map(int, _get_default_store().compare_set(NOTE, "", note).decode().split(","))
    return ProcessLostError(
        f"process {mesh.rank} lost process {first}"
        + (f" (noticed first by process {noticed_by})" if noticed_by != mesh.rank else "")
        + f": it ended or did not answer within {mesh.timeout_s:g} s; see its own output for the cause. "
        f"The transfer with process {peer} failed with: {str(error).splitlines()[0]}"
    )


def _send(mesh: ProcessMesh, message: torch.Tensor, place: int) -> dist.Work | None:
    with naming_the_lost(mesh, place):
        return dist.isend(message, group=mesh.groups.control, group_dst=place)


def _receive(mesh: ProcessMesh, message: torch.Tensor, place: int) -> dist.Work | None:
    with naming_the_lost(mesh, place):
        return dist.irecv(message, group=mesh.groups.control, group_src=place)


def _wait(mesh: ProcessMesh, works: Mapping[int, dist.Work | None]) -> None:
    for place, work in works.items():
        assert work is not None  # only outside the group
        with naming_the_lost(mesh, place):
            work.wait()


Held = tuple[dict[str, str], str | None]  # facts and problem of one process


def _raise_what_differs(everybody: Sequence[Held], ranks: Sequence[int]) -> None:
    """One text on all processes, from what each of them holds; nothing where they hold the same without a problem."""
    problems = defaultdict(list)
    for rank, (_, problem) in zip(ranks, everybody, strict=True):
        if problem is not None:
            problems[problem].append(str(rank))
    if problems:
        raise ValueError("; ".join(f"process {', '.join(holders)}: {problem}" for problem, holders in problems.items()))
    lines = []
    for name in sorted({name for held, _ in everybody for name in held}):
        holders = defaultdict(list)
        for rank, (held, _) in zip(ranks, everybody, strict=True):
            holders[held.get(name, "nothing")].append(str(rank))
        if len(holders) > 1:
            lines.append(f"{name} is " + " but ".join(f"{v} on process {', '.join(p)}" for v, p in holders.items()))
    if lines:
        raise ValueError(
            f"the processes of one globe must work on the same thing, but {'; '.join(lines)}; give all of them the same"
        )
