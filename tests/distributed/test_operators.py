"""<F x, y> = <x, F* y> for every operator between processes, on every layout; what a plan holds."""

import pytest
import torch
import torch.distributed as dist

from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, Neighbourhood, ProcessMesh
from sfno_dist.comm import Gather, Reach, Ring, halo_plan, latitude_plan, sum_over_globe, transpose


def gap(inputs, outputs, ys, gradients):
    """|<F x, y> - <x, F* y>| over |<F x, y>|, inner products over all processes."""
    products = torch.stack(
        [
            sum((x * y.conj()).sum().real for x, y in zip(outputs, ys, strict=True)).detach(),
            sum((x * g.conj()).sum().real for x, g in zip(inputs, gradients, strict=True)).detach(),
        ]
    )
    dist.all_reduce(products)
    return float((products[0] - products[1]).abs() / products[0].abs())


def adjoint_gap(operator, *inputs):
    outputs = operator(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    ys = [torch.randn_like(x) for x in outputs]
    return gap(inputs, outputs, ys, torch.autograd.grad(outputs, inputs, ys))


def ring_gap(mesh, points):
    """Of the ring, whose adjoint is a method: F x = the chunks of all processes, F* y = the sums of what they get."""
    ring = Ring(mesh, points)
    chunk = [torch.randn(2, points[mesh.azimuth_index], c, dtype=torch.float64) for c in (3, 2)]
    visitors = dict(ring.around(chunk))
    assert sorted(visitors) == list(range(mesh.azimuth))
    ys = {owner: [torch.randn_like(x) for x in visitor] for owner, visitor in visitors.items()}
    sums = ring.around_with_sums(chunk, lambda owner, _: [y.clone() for y in ys[owner]])
    outputs = [x for owner in visitors for x in visitors[owner]]
    return gap(chunk, outputs, [y for owner in visitors for y in ys[owner]], sums)


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
    gaps["ring"] = ring_gap(mesh, [5 + 2 * owner for owner in range(azimuth)])
    for axis, size, here in (("polar", polar, mesh.polar_index), ("azimuth", azimuth, mesh.azimuth_index)):
        whole, cut = [tuple(i * n // size for i in range(size + 1)) for n in (11, 7)]
        x = torch.randn(2, 7, whole[here + 1] - whole[here], dtype=torch.complex128, requires_grad=True)
        gaps[axis] = adjoint_gap(lambda x: transpose(x, mesh, axis, whole=(2, whole), cut=(1, cut)) * 1.0, x)  # noqa: B023
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    gaps["sum"] = adjoint_gap(lambda x: sum_over_globe(x, mesh), x)
    return gaps


@pytest.mark.parametrize(("polar", "azimuth"), [(1, 2), (2, 2), (1, 3), (3, 2), (2, 4)])
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
