"""Every layout of processes writes the same file, and one that was killed goes on to the same bits."""

import os
import shutil
import signal

import numpy as np
import pytest
from distributed.ranks import run_ranks
from forecasts.small_checkpoint import checkpoint, fields, same
from training.commands import sfno_dist

from sfno_dist import ProcessMesh
from sfno_dist.data import DataError
from sfno_dist.forecasts import Request, forecast, store
from sfno_dist.forecasts.rollout import Rollout

INITS = ["2020-01-03T06", "2020-01-05", "2020-01-08"]
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    checkpoint(folder)
    forecast(request(folder, folder / "serial.zarr"), ProcessMesh())
    return folder


def request(folder, output) -> Request:
    return Request(str(folder / "c.ckpt"), str(output), INITS, STEPS, members=2, seed=3)


def on_mesh(folder, output, sizes, killed_at=None, failing=None):
    """Kills the last process, or lets it fail to write, in the trajectory and at the step given."""
    mesh = ProcessMesh(*sizes, timeout_s=60)
    advance, write = Rollout.advance, store.Fields.write

    def dying(self, features):
        advance(self, features)
        if mesh.rank == mesh.size - 1 and (self.trajectory.number, self.step) == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def full(self, v, place, field):
        if mesh.rank == mesh.size - 1 and place[:2] == failing:
            raise OSError(28, "No space left on device")
        write(self, v, place, field)

    Rollout.advance, store.Fields.write = dying, full
    try:
        return forecast(request(folder, output), mesh)
    except (ValueError, RuntimeError) as error:
        return str(error)
    finally:
        Rollout.advance, store.Fields.write = advance, write


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (3, 1, 1), (1, 3, 1)])
def test_every_layout_writes_the_file_of_one_process(folder, tmp_path, sizes):
    assert run_ranks(int(np.prod(sizes)), on_mesh, folder, tmp_path / "f.zarr", sizes) == [3] * int(np.prod(sizes))
    one, many = fields(folder / "serial.zarr"), fields(tmp_path / "f.zarr")
    assert one.drop_vars(list(one.data_vars)).identical(many.drop_vars(list(many.data_vars)))
    for name in one.data_vars:
        spread = float(one[name].std())
        np.testing.assert_allclose(many[name].values, one[name].values, rtol=1e-5, atol=1e-5 * spread)
        np.testing.assert_array_equal(many[name].values[:, 0], one[name].values[:, 0])  # perturbed alike to the bit
    if sizes[1:] == (1, 1):
        assert same(one, many)
    assert [path.name for path in tmp_path.iterdir()] == ["f.zarr"]


@pytest.mark.parametrize(("sizes", "then"), [((1, 1, 1), (1, 1, 1)), ((1, 2, 2), (1, 2, 2)), ((2, 1, 2), (1, 1, 1))])
def test_a_killed_forecast_goes_on_to_the_same_bits(folder, tmp_path, sizes, then):
    size, alone = int(np.prod(sizes)), int(np.prod(then))
    killed_at = (3, 2) if sizes != (2, 1, 2) else (5, 2)
    left = run_ranks(size, on_mesh, folder, tmp_path / "f.nc", sizes, killed_at, living=size - 1)
    assert left[-1] == "ended without a result" and all(isinstance(one, str) for one in left)  # errors all
    assert [path.name for path in tmp_path.iterdir()] == [".f.nc.partial"]
    made = counted(alone, folder, tmp_path / "f.nc", then)
    undisturbed = tmp_path / "undisturbed.nc"
    assert run_ranks(alone, on_mesh, folder, undisturbed, then) == [3] * alone
    if sizes == then:
        # Three whole forecasts were kept, and the step whose writing had ended: one may have been on its way.
        assert 24 - 3 * STEPS - 1 <= made <= 24 - 3 * STEPS
        assert same(fields(tmp_path / "f.nc"), fields(undisturbed))
    else:  # of another layout only whole forecasts are kept
        a, b = fields(tmp_path / "f.nc"), fields(undisturbed)
        for name in a.data_vars:
            np.testing.assert_allclose(a[name].values, b[name].values, rtol=1e-5, atol=1e-5 * float(b[name].std()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.nc", "undisturbed.nc"]


def counted(size, *arguments) -> int:
    """Steps that were made by the first of ``size`` processes."""
    found = run_ranks(size, _counting, *arguments)
    assert all(isinstance(steps, int) for steps in found), found
    return found[0]


def _counting(folder, output, sizes) -> int:
    mesh, steps, advance = ProcessMesh(*sizes, timeout_s=60), [], Rollout.advance

    def noted(self, features):
        steps.append(self.step)
        advance(self, features)

    Rollout.advance = noted
    try:
        forecast(request(folder, output), mesh)
    finally:
        Rollout.advance = advance
    return len(steps)


def test_a_disk_that_is_full_for_one_process_is_an_error_on_all(folder, tmp_path):
    texts = run_ranks(4, on_mesh, folder, tmp_path / "f.zarr", (1, 2, 2), None, (1, 1))
    # Three variables: the last of four processes writes none, so nothing fails there.
    assert texts == [3] * 4
    shutil.rmtree(tmp_path / "f.zarr")
    texts = run_ranks(2, on_mesh, folder, tmp_path / "f.zarr", (1, 2, 1), None, (1, 1))
    assert len(set(texts)) == 1 and "cannot be written or read (No space left on device)" in texts[0]


def test_two_commands_do_not_write_one_forecast(folder, tmp_path):
    from sfno_dist.forecasts.progress import Progress

    first = Progress(tmp_path / "f.nc", ProcessMesh())
    first.begin({})
    with pytest.raises(DataError, match="another command is writing this forecast"):
        forecast(request(folder, tmp_path / "f.nc"), ProcessMesh())


@pytest.mark.slow
def test_the_command_starts_the_processes_of_its_mesh(folder, tmp_path):
    words = ["forecast", folder / "c.ckpt", "--init", *INITS, "--steps", STEPS, "--members", 2, "--seed", 3]
    done = sfno_dist(tmp_path, *words, "--output", "f.zarr", "--mesh", "polar=1,azimuth=2")
    assert done.returncode == 0, done.stderr
    assert "wrote f.zarr: t2m, sst, tp, 4 x 6 hours, 3 init times x 2 members" in done.stdout
    for name in (one := fields(folder / "serial.zarr")).data_vars:
        spread = float(one[name].std())
        many = fields(tmp_path / "f.zarr")[name].values
        np.testing.assert_allclose(many, one[name].values, rtol=1e-5, atol=1e-5 * spread)
    done = sfno_dist(tmp_path, *words, "--output", "f.zarr", "--mesh", "polar=2,azimuth=40")
    assert done.returncode == 1 and done.stderr.count("error: ") == 1 and "mesh.azimuth" in done.stderr
