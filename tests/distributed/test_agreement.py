"""Processes that do not do the same thing get the same error instead of a hang, and a lost process is named."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import run_ranks
from sfno_dist import Grid, ProcessMesh, SphericalAttention, SphericalTransformer
from sfno_dist.mesh import ProcessLostError

GRID = Grid("equiangular", 13, 24)


def message_of(make, *arguments, **options):
    with pytest.raises(ValueError, match="process") as caught:
        make(*arguments, **options)
    return str(caught.value)


def mismatches():
    mesh, messages = ProcessMesh(1, 2, 2, timeout_s=300), {}
    layer = SphericalAttention(4, GRID, mesh=mesh)
    shape = layer.queries.tile_shape
    odd = mesh.rank == 3
    for name, field in (
        ("size", torch.zeros(2 if odd else 1, 4, *shape)),
        ("dtype", torch.zeros(1, 4, *shape, dtype=torch.float64 if odd else torch.float32)),
        ("tile", torch.zeros(1, 4, 5, 5) if odd else torch.zeros(1, 4, *shape)),
        ("gradient", torch.zeros(1, 4, *shape, requires_grad=odd)),
    ):
        messages[name] = message_of(layer, field)
    other = SphericalTransformer(4, 4, GRID, GRID, embed_channels=4, num_heads=1, mesh=mesh)
    torch.nn.init.constant_(other.head.bias, float(odd))
    messages["weights"] = message_of(other, torch.zeros(1, 4, *shape))
    half = SphericalAttention(4, GRID, mesh=mesh).to(torch.float64 if odd else torch.float32)
    messages["dtype of the weights"] = message_of(half, torch.zeros(1, 4, *shape))
    for name, options in (
        ("cutoff", {"theta_cutoff": 0.5 if odd else 0.4}),
        ("digits", {"theta_cutoff": 0.4 + 1e-12 * odd}),
        ("heads", {"num_heads": 3 if odd else 2}),
        ("exchange", {"exchange": "ring" if odd else "halo"}),
        ("unknown exchange", {"exchange": "rong" if odd else "halo"}),
        ("scale", {"scale": 1.0 if odd else 2.0}),
    ):
        messages[name] = message_of(SphericalAttention, 4, GRID, mesh=mesh, **options)
    messages["everybody"] = message_of(SphericalAttention, 4, GRID, mesh=mesh, num_heads=3)
    messages["balance"] = message_of(ProcessMesh, 1, 2, 2, row_balance="work" if odd else "count")
    messages["layout"] = message_of(ProcessMesh, 1, 1 if odd else 2, 4 if odd else 2)
    messages["number"] = message_of(ProcessMesh, 1, 3 if odd else 2, 2)
    messages["word"] = message_of(ProcessMesh, 1, 2, 2, row_balance="rows" if odd else "count")
    layer(torch.zeros(1, 4, *shape))  # nothing is left over in the way of the next message
    return messages


WORDS = {
    "size": "query is ((1, 4)",
    "dtype": "torch.float64",
    "tile": "process 3: query must be",
    "gradient": "query is ",
    "weights": "start all processes from the same seed or state dict) on process 0, 1, 2 but checksum",
    "dtype of the weights": "start all processes from the same seed or state dict) on process 3",
    "cutoff": "theta_cutoff=0.5",
    "digits": "checksum",
    "heads": "process 3: num_heads=3 does not divide",
    "exchange": "exchange is halo on process 0, 1, 2 but ring on process 3",
    "unknown exchange": "process 3: unknown exchange 'rong'",
    "scale": "scale=1.0",
    "everybody": "process 0, 1, 2, 3: num_heads=3 does not divide k_channels=4",
    "balance": "mesh is (1, 2, 2, 'count') on process 0, 1, 2 but (1, 2, 2, 'work') on process 3",
    "layout": "mesh is (1, 2, 2, 'count') on process 0, 1, 2 but (1, 1, 4, 'count') on process 3",
    "number": "process 3: mesh asks for 1 x 3 x 2 = 6 processes",
    "word": "process 3: mesh.row_balance must be one of count, work, got 'rows'",
}


def test_what_differs_is_the_same_error_on_every_process():
    first, *others = run_ranks(4, mismatches)
    assert isinstance(first, dict), first
    assert all(other == first for other in others)
    for name, words in WORDS.items():
        assert words in first[name], (name, first[name])
    assert first.keys() == WORDS.keys()


def absent():
    if dist.get_rank() == 1:
        return None
    with pytest.raises(ProcessLostError) as caught:
        ProcessMesh(1, 1, 3, timeout_s=2)
    return str(caught.value)


def test_a_process_that_makes_no_layout_is_named():
    for rank, result in enumerate(run_ranks(3, absent)):
        assert rank == 1 or "process 1 made none within 2 s" in result


def dies():
    mesh = ProcessMesh(1, 1, 3, timeout_s=20)
    layer = SphericalAttention(4, GRID, mesh=mesh)
    layer(torch.zeros(1, 4, *layer.queries.tile_shape))
    if mesh.rank == 2:
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        layer(torch.zeros(1, 4, *layer.queries.tile_shape))
    return str(caught.value), time.monotonic() - start


def test_a_process_that_dies_is_named_by_the_others_in_time():
    for result in run_ranks(3, dies, living=2)[:2]:
        assert isinstance(result, tuple), result
        assert "lost process 2" in result[0] and result[1] < 25.0


def test_a_process_that_is_gone_when_a_message_starts_is_named(monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "isend", gone)
    monkeypatch.setattr(ProcessMesh, "groups", SimpleNamespace(control=None))
    mesh = ProcessMesh.on_paper(azimuth=2, rank=1)
    mesh.paper = False  # as if there were processes
    with pytest.raises(ProcessLostError, match="process 1 lost process 0"):
        mesh.agree({})
