"""What goes over the wire, when, and what a process holds meanwhile."""

import pytest
import torch

from distributed.counting import PeakMemory, received_messages
from distributed.ranks import run_ranks
from sfno_dist import Decomposition, Grid, ProcessMesh, SphericalAttention
from sfno_dist.comm import whole
from sfno_dist.comm.wire import Flight
from sfno_dist.layers import exchange as exchanges

CHANNELS, VALUE_CHANNELS, BATCH = 6, 4, 2
GRID = Grid("equiangular", 13, 24)


DTYPES = {torch.float32: 4, torch.bfloat16: 2, torch.float64: 8}  # bytes of a value
#: what needs a gradient -> channels of the gradients that go home
NEEDS = {"all": CHANNELS + VALUE_CHANNELS, "values": VALUE_CHANNELS, "query": 0}


def bytes_received(polar, azimuth):
    """(received, expected) in forward and in backward, by exchange, dtype and what needs a gradient."""
    mesh, found = ProcessMesh(1, polar, azimuth, timeout_s=300), {}
    for exchange in ("halo", "ring"):
        for dtype, size in DTYPES.items():
            for needs, returning in NEEDS.items():
                torch.manual_seed(0)
                layer = SphericalAttention(CHANNELS, GRID, mesh=mesh, exchange=exchange, out_channels=VALUE_CHANNELS)
                layer.double() if dtype == torch.float64 else layer.float()
                for name, p in layer.named_parameters():
                    p.requires_grad_(needs == "all" or name[0] == needs[0])
                x = torch.randn(BATCH, CHANNELS, *layer.queries.tile_shape, dtype=layer.q_weights.dtype)
                with received_messages() as messages:
                    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                        y = layer(x)
                    forward = sum(m.nbytes for m in messages)
                    y.double().sum().backward()
                    backward = sum(m.nbytes for m in messages) - forward
                    expected = [BATCH * size * values for values in values_received(layer, returning)]
                found[exchange, dtype, needs] = [forward, backward], expected
    return found


def values_received(layer, returning):
    """Values that one sample brings in forward and in backward, from the plans."""
    both, exchange = CHANNELS + VALUE_CHANNELS, layer.exchange
    gather = exchange.gather if isinstance(exchange, exchanges.HaloAttention) else exchange.latitudes
    forward = backward = 0
    if gather is not None:
        forward += gather.plan.received * both
        backward += gather.plan.sent * returning
    if isinstance(exchange, exchanges.RingAttention) and layer.mesh.azimuth > 1:
        points, here = exchange.ring.points, layer.mesh.azimuth_index
        passing = (sum(points) - points[here]) * both
        # Chunks pass once in each direction of time; sums follow them and come home, one step further.
        forward, backward = forward + passing, backward + passing + sum(points) * returning
    return forward, backward


@pytest.mark.parametrize(("polar", "azimuth"), [(1, 3), (2, 2), (3, 1)])
def test_what_arrives_is_what_was_planned_in_16_bits_too_and_nothing_that_nobody_needs(polar, azimuth):
    for result in run_ranks(polar * azimuth, bytes_received, polar, azimuth):
        assert isinstance(result, dict), result
        assert all(got == expected for got, expected in result.values()), result


def work_under_way(exchange):
    """For each transfer, in order of starting: how often attention was computed before its end was waited for."""
    mesh, transfers, computed = ProcessMesh(1, 1, 3, timeout_s=300), [], []
    layer = SphericalAttention(CHANNELS, GRID, mesh=mesh, exchange=exchange)
    start, wait = Flight.__init__, Flight.wait

    def recorded_start(self, *arguments):
        self.number, self.before = len(transfers), len(computed)
        transfers.append(None)
        start(self, *arguments)

    def recorded_wait(self):
        transfers[self.number] = len(computed) - self.before
        wait(self)

    def recorded(function):
        def compute(*arguments, **options):
            computed.append(function)
            return function(*arguments, **options)

        return compute

    Flight.__init__, Flight.wait = recorded_start, recorded_wait
    exchanges.attend = recorded(exchanges.attend)
    exchanges.attend_backward = recorded(exchanges.attend_backward)
    y = layer(torch.randn(1, CHANNELS, *layer.queries.tile_shape))
    forward = len(transfers)
    y.sum().backward()
    return transfers[:forward], transfers[forward:]


def test_attention_is_computed_while_messages_are_under_way():
    for result in run_ranks(3, work_under_way, "halo"):
        assert result == ([1], [1]), result
    for result in run_ranks(3, work_under_way, "ring"):
        # Backward: chunks and sums start in turn; only the last sums have nothing left to hide behind.
        assert result == ([1, 1], [1, 1, 1, 1, 0]), result


def peak_memory(azimuth):
    mesh = ProcessMesh(1, 1, azimuth, timeout_s=300)
    layer = SphericalAttention(32, Grid("equiangular", 48, 96), mesh=mesh, exchange="ring")
    x = torch.randn(1, 32, *layer.queries.tile_shape, requires_grad=True)
    with PeakMemory() as memory:
        layer(x).sum().backward()
    return memory.peak


def test_memory_of_the_ring_falls_as_1_over_the_processes():
    peaks = {azimuth: max(run_ranks(azimuth, peak_memory, azimuth)) for azimuth in (2, 4, 8)}
    for processes in (2, 4):
        assert peaks[2 * processes] < 0.57 * peaks[processes], peaks


def test_one_process_exchanges_nothing():
    layer = SphericalAttention(4, GRID, mesh=ProcessMesh())
    assert isinstance(layer.exchange, exchanges.WholeGlobe)
    x = torch.randn(1, 4, *GRID.shape)
    with received_messages() as messages:
        layer(x).sum().backward()
    assert messages == []


def put_together(polar, azimuth, at):
    mesh = ProcessMesh(1, polar, azimuth, timeout_s=300)
    tile = Decomposition(GRID, mesh)
    field = torch.arange(len(at) * 13 * 24).reshape(len(at), 13, 24).double()
    return {v: torch.equal(field[v], one) for v, one in whole(field[:, tile.rows, tile.columns], tile, at).items()}


@pytest.mark.parametrize(("polar", "azimuth", "at"), [(1, 1, [0, 0]), (1, 3, [2, 0, 0, 1]), (3, 2, [0, 5, 5])])
def test_every_whole_field_is_where_it_was_wanted(polar, azimuth, at):
    found = run_ranks(polar * azimuth, put_together, polar, azimuth, at)
    assert found == [{v: True for v, place in enumerate(at) if place == rank} for rank in range(polar * azimuth)]
