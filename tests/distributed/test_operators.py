"""<F x, y> = <x, F* y> for every exchange; what is received is what was planned; errors that all processes share."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh, SphericalAttention
from sfno_dist.comm import Gather, Reach, halo_plan, latitude_plan, sum_over_globe, transpose
from sfno_dist.comm.wire import Flight
from sfno_dist.layers import exchange as exchanges
from sfno_dist.mesh import ProcessLostError


def adjoint_gap(operator, *inputs):
    """|<F x, y> - <x, F* y>| over |<F x, y>|, inner products over all processes."""
    outputs = operator(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ys = [torch.randn_like(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, inputs, ys)
    products = torch.stack(
        [
            sum((x * y.conj()).sum().real for x, y in zip(outputs, ys, strict=True)).detach(),
            sum((x * g.conj()).sum().real for x, g in zip(inputs, gradients, strict=True)).detach(),
        ]
    )
    dist.all_reduce(products)
    return float((products[0] - products[1]).abs() / products[0].abs())


def operator_gaps(polar, azimuth):
    mesh, gaps = ProcessMesh(1, polar, azimuth, timeout_s=300), {}
    torch.manual_seed(mesh.rank)
    for shape_in, shape_out, cutoff in (((13, 24), (13, 24), 0.3), ((19, 40), (7, 15), 0.5), ((9, 17), (12, 30), 4.0)):
        grid_in, grid_out = Grid("equiangular", *shape_in), Grid("equiangular-offset", *shape_out)
        keys, queries = Decomposition(grid_in, mesh), Decomposition(grid_out, mesh)
        reach = Reach(Neighbourhood(grid_in, grid_out, cutoff), keys, queries)
        points = keys.tile_shape[0] * keys.tile_shape[1]
        for name, plan in (("halo", halo_plan(reach)), ("latitude", latitude_plan(reach))):
            gather = Gather(mesh, plan)
            fields = [torch.randn(2, points, c, dtype=torch.float64, requires_grad=True) for c in (3, 2)]
            gaps[name, shape_in] = adjoint_gap(lambda *fields: gather(fields), *fields)  # noqa: B023
    for axis, size, here in (("polar", polar, mesh.polar_index), ("azimuth", azimuth, mesh.azimuth_index)):
        whole, cut = [tuple(i * n // size for i in range(size + 1)) for n in (11, 7)]
        x = torch.randn(2, 7, whole[here + 1] - whole[here], dtype=torch.complex128, requires_grad=True)
        gaps[axis] = adjoint_gap(lambda x: transpose(x, mesh, axis, whole=(2, whole), cut=(1, cut)) * 1.0, x)  # noqa: B023
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gaps["sum"] = adjoint_gap(lambda x: sum_over_globe(x, mesh), x)
    return gaps


@pytest.mark.parametrize(("polar", "azimuth"), [(2, 2), (1, 3), (3, 2)])
def test_adjoints(polar, azimuth):
    for result in run_ranks(polar * azimuth, operator_gaps, polar, azimuth):
        assert isinstance(result, dict), result
        assert max(result.values()) < 1e-11, result


def columns_planned(rank, nlat, nlon, cutoff):
    grid, mesh = Grid("equiangular", nlat, nlon), ProcessMesh.on_paper(azimuth=4, rank=rank)
    tile = Decomposition(grid, mesh)
    return halo_plan(Reach(Neighbourhood(grid, None, cutoff), tile, tile)).received


def test_a_halo_is_a_thirtieth_of_a_ring_at_a_quarter_of_a_degree():
    received = columns_planned(1, 721, 1440, 0.0131)
    assert received == 21670 and 30 * received < 778680


def mismatches():
    mesh, grid, messages = ProcessMesh(1, 2, 2, timeout_s=300), Grid("equiangular", 13, 24), []
    layer = SphericalAttention(4, grid, mesh=mesh)
    shape = layer.queries.tile_shape
    odd = mesh.rank == 3
    for field in (
        torch.zeros(2 if odd else 1, 4, *shape),
        torch.zeros(1, 4, *shape, dtype=torch.float64 if odd else torch.float32),
        torch.zeros(1, 4, 5, 5) if odd else torch.zeros(1, 4, *shape),
    ):
        with pytest.raises(ValueError, match="process") as caught:
            layer(field)
        messages.append(str(caught.value))
    with pytest.raises(ValueError, match="process") as caught:
        SphericalAttention(4, grid, mesh=mesh, theta_cutoff=0.5 if odd else 0.4)
    return [*messages, str(caught.value)]


def test_what_differs_is_the_same_error_on_every_process():
    first, *others = run_ranks(4, mismatches)
    assert isinstance(first, list), first
    assert all(other == first for other in others)
    assert "on process 3" in first[0] and "float64" in first[1] and first[2].startswith("process 3: query must be")
    assert "theta_cutoff=0.5" in first[3]


def dies():
    mesh = ProcessMesh(1, 1, 3, timeout_s=20)
    layer = SphericalAttention(4, Grid("equiangular", 13, 24), mesh=mesh)
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
    with pytest.raises(ProcessLostError, match="process 1 lost process 0"):
        ProcessMesh.on_paper(azimuth=2, rank=1).agree({})


def trace_of_a_halo():
    mesh, events = ProcessMesh(1, 1, 2, timeout_s=300), []
    layer = SphericalAttention(4, Grid("equiangular", 13, 24), mesh=mesh)
    attend, start, wait = exchanges.attend, Flight.__init__, Flight.wait
    received = []

    def recorded_start(self, mesh, sends, receives):
        events.append("sent")
        received.append(sum(x.numel() for _, x in receives))
        start(self, mesh, sends, receives)

    def recorded_wait(self):
        events.append("arrived")
        wait(self)

    def recorded_attend(*arguments, **options):
        events.append("attended")
        return attend(*arguments, **options)

    Flight.__init__, Flight.wait, exchanges.attend = recorded_start, recorded_wait, recorded_attend
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(torch.randn(1, 4, *layer.queries.tile_shape))
    y.float().sum().backward()
    return events, received, layer.exchange.gather.plan.received


def test_own_keys_are_worked_on_while_others_are_under_way_and_bytes_are_as_planned():
    for result in run_ranks(2, trace_of_a_halo):
        assert isinstance(result, tuple), result
        events, received, planned = result
        assert events[:3] == ["sent", "attended", "arrived"] and events[-2:] == ["sent", "arrived"]
        assert received[0] == planned * 8  # 4 channels each of keys and values
