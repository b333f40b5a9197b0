"""What the README says is run as it stands."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from sfno_dist import Grid, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.S)


def run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=1200, env={**os.environ})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_links_and_pictures_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).is_file(), target


def test_the_python_snippet_runs(tmp_path):
    snippet, _ = blocks("python")
    (tmp_path / "snippet.py").write_text(snippet + "\nprint(grid, tuple(y.shape))\n")
    env = f"PYTHONPATH={ROOT}"
    out = run(["env", env, sys.executable, str(tmp_path / "snippet.py")], ROOT)
    assert out.strip() == "equiangular 73 x 144 (1, 16, 24, 48)"


def test_the_snippet_for_several_processes_runs(tmp_path):
    _, snippet = blocks("python")
    norm = "sum(float(p.grad.square().sum()) for p in layer.parameters())"
    (tmp_path / "tiles.py").write_text(f"{snippet}\nopen(f'norm{{dist.get_rank()}}', 'w').write(str({norm}))\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run(["env", f"PYTHONPATH={ROOT}", "OMP_NUM_THREADS=1", *torchrun, "tiles.py"], tmp_path)
    norms = [(tmp_path / f"norm{rank}").read_text() for rank in range(4)]
    assert len(set(norms)) == 1 and float(norms[0]) > 0.0


def test_the_plan_is_that_of_the_readme(tmp_path):
    (command,) = [block for block in blocks("bash") if "sfno-dist plan" in block]
    out = run(["bash", "-ec", command.replace(".venv/bin/sfno-dist", f"{sys.executable} -m sfno_dist.cli")], ROOT)
    assert out.split("\n", 1)[1] in README


@pytest.mark.slow
def test_the_commands_for_several_processes_run(tmp_path):
    (commands,) = [block for block in blocks("bash") if "torchrun" in block]
    limits = "+trainer.limit_train_batches=2 +trainer.limit_val_batches=1 +trainer.limit_test_batches=1"
    programs = {".venv/bin/python": sys.executable, ".venv/bin/torchrun": f"{sys.executable} -m torch.distributed.run"}
    for line in commands.strip().splitlines():
        for name, program in programs.items():
            line = line.replace(name, program)
        words = shlex.split(f"{line} {limits}".replace("train.py", str(ROOT / "train.py")))
        assert "test: one step (1 month) ahead" in run(["env", "OMP_NUM_THREADS=1", *words], tmp_path)
    assert len(list((tmp_path / "runs" / "smoke").iterdir())) == 2


@pytest.mark.slow
def test_the_layout_of_the_readme_changes_nothing(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (command,) = [block for block in blocks("bash") if "verify-layout" in block]
    cli.main(shlex.split(command)[1:])
    assert "the layout changes nothing" in capsys.readouterr().out


def test_the_commands_for_data_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (commands,) = [block for block in blocks("bash") if "sfno-dist demo" in block]
    for line in commands.strip().splitlines():
        cli.main(shlex.split(line)[1:])
    assert "Chunks do not fit 2 x 2 processes: 4 bytes are read for one that is needed" in capsys.readouterr().out
    cli.main(["inspect", "demo_tiles.zarr", "--mesh", "polar=2,azimuth=2"])
    assert "Chunks fit 2 x 2 processes: 1.00 bytes" in capsys.readouterr().out


@pytest.mark.slow
def test_your_own_data(tmp_path):
    """The command for ERA5-like files, on small ones of that kind, cut to a few steps."""
    (command,) = [block for block in blocks("bash") if "name=mine" in block]
    grid, times = Grid("equiangular", 19, 36), pd.date_range("2015-12-20", "2018-01-10", freq="6h")
    rng = np.random.default_rng(0)
    fields = {
        name: (
            ("time", "latitude", "longitude"),
            rng.standard_normal((len(times), *grid.shape)).astype("f4"),
            {"units": unit},
        )
        for name, unit in (("t2m", "K"), ("z500", "m**2 s**-2"))
    }
    coordinates = {"time": times, "latitude": -grid.latitudes_degrees, "longitude": grid.longitudes_degrees - 180.0}
    xr.Dataset(fields, coordinates).to_netcdf(tmp_path / "a.nc")
    words = shlex.split(command.replace("\\\n", " ").replace("/data/era5/*.nc", f"{tmp_path}/*.nc"))
    assert words[:2] == [".venv/bin/python", "train.py"]
    limits = ["trainer.max_epochs=1", "trainer.accelerator=cpu", "grid.latent.nlat=8", "grid.latent.nlon=16"]
    limits += [f"+trainer.limit_{split}_batches=2" for split in ("train", "val", "test")]
    out = run([sys.executable, str(ROOT / "train.py"), *words[2:], *limits], tmp_path)
    assert "test: one step (6 hours) ahead" in out and "z500" in out


@pytest.mark.slow
def test_the_demo_beats_persistence_and_climatology(tmp_path):
    """`python train.py` without arguments, then the forecast command of the README on its checkpoint."""
    out = run([sys.executable, str(ROOT / "train.py"), "trainer.accelerator=cpu"], tmp_path)
    table = [line.split() for line in out.split("\ntest:")[1].splitlines() if line.startswith(("uwnd", "vwnd"))]
    assert len(table) == 2
    for _variable, _units, model, persistence, climatology, *skills in table:
        assert float(model) < min(float(persistence), float(climatology))
        assert all(float(skill) > 0.1 for skill in skills[:2])
        _bias, correlation, of_persistence = map(float, skills[2:])
        assert correlation > of_persistence > 0.0
    (command,) = [block for block in blocks("bash") if "sfno-dist forecast" in block and "--plot" in block]
    run(["bash", "-ec", command.replace(".venv/bin/sfno-dist", f"{sys.executable} -m sfno_dist.cli")], tmp_path)
    assert (tmp_path / "forecast.nc").is_file() and (tmp_path / "forecast.png").is_file()
    (command,) = [block for block in blocks("bash") if "sfno-dist forecast" in block and "--members" in block]
    run(["bash", "-ec", command.replace(".venv/bin/sfno-dist", f"{sys.executable} -m sfno_dist.cli")], tmp_path)
    with xr.open_dataset(tmp_path / "ensemble.zarr", decode_timedelta=True) as ensemble:
        assert ensemble.uwnd.shape == (6, 4, 4, 73, 144)
    (tmp_path / "data").symlink_to(ROOT / "data")
    (command,) = [block for block in blocks("bash") if "sfno-dist score" in block]
    out = run(["bash", "-ec", command.replace(".venv/bin/sfno-dist", f"{sys.executable} -m sfno_dist.cli")], tmp_path)
    assert "uwnd" in out and "1 month" in out and (tmp_path / "scores.html").is_file()
