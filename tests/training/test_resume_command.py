"""``resume=`` as a user gives it: the same bits after a kill, and one line for what cannot go on."""

import re

import pytest
import torch
from training.commands import kill_once, train
from training.test_command_line import TINY, assert_one_line
from training.test_resume import assert_same

SETTINGS = [*TINY, "trainer.max_epochs=3", "model.dropout=0.1", "callbacks.last.every_n_steps=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of checkpoints of a run that nothing interrupted."""
    cwd = tmp_path_factory.mktemp("command")
    done = train(cwd, *SETTINGS, "hydra.run.dir=run")
    assert done.returncode == 0, done.stderr
    return cwd / "run" / "checkpoints"


@pytest.mark.slow
def test_a_killed_command_goes_on_in_its_folder_with_the_same_bits(whole, tmp_path):
    settings = [*SETTINGS, "data.num_workers=2", "hydra.run.dir=run", "resume=auto"]
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    kill_once(last, tmp_path, *settings)
    assert torch.load(last)["global_step"] < 9
    done = train(tmp_path, *settings)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    ends = [torch.load(path) for path in (whole / "last.ckpt", last)]
    for part in ("global_step", "epoch", "state_dict", "optimizer_states", "lr_schedulers"):
        assert_same(ends[0][part], ends[1][part])
    assert_same(*(end["callbacks"]["RandomState"] for end in ends))
    best = [torch.load(folder / "best.ckpt") for folder in (whole, last.parent)]
    assert best[0]["global_step"] == best[1]["global_step"]
    assert_same(best[0]["state_dict"], best[1]["state_dict"])


def test_a_training_that_goes_on_in_another_folder_has_nothing_to_warn_of(whole, tmp_path):
    done = train(tmp_path, *SETTINGS, f"resume={whole / 'last.ckpt'}", "trainer.max_epochs=4", "hydra.run.dir=run")
    assert done.returncode == 0 and not re.search(r"\.py:\d+:", done.stderr), done.stderr
    assert torch.load(tmp_path / "run" / "checkpoints" / "best.ckpt")["epoch"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.embed_channels=8"], "model.embed_channels was 16 in the checkpoint and is 8 now"),
        (["grid.latent.nlat=8"], "model.latent_grid was {'kind': "),
        (["data.variables=[vwnd,uwnd]"], "prognostic was ['uwnd', 'vwnd'] in the checkpoint and is ['vwnd', 'uwnd']"),
        (["data.splits.train=[1982-01,1984-12]"], "mean and spread of uwnd over the training period are not those"),
        (["seed=3"], "with seed 1982, now there are 3; resume with the same data"),
    ],
)
def test_a_training_that_cannot_go_on_from_it_says_why(whole, tmp_path, overrides, words):
    part = tmp_path / "part.ckpt"
    stored = torch.load(whole / "last.ckpt")
    stored["WeatherDataModule"]["consumed"] = 2  # as in the middle of an epoch
    torch.save(stored, part)
    assert_one_line(train(tmp_path, *SETTINGS, f"resume={part}", *overrides), words)


@pytest.mark.parametrize("kind", ["absent", "truncated", "foreign", "newer"])
def test_a_file_to_go_on_from_that_is_none_is_refused_with_one_line(tmp_path, kind):
    path = tmp_path / "c.ckpt"
    held = {"state_dict": {"a": torch.zeros(1000)}, "loops": {}, "global_step": 0, "epoch": 0}
    held["pytorch-lightning_version"] = "2.5.0"
    if kind != "absent":
        torch.save({**held, **({"sfno_dist": {"format": 999}} if kind == "newer" else {})}, path)
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:2000])
    words = {
        "absent": "c.ckpt: no such checkpoint file",
        "truncated": "c.ckpt: not a readable checkpoint (truncated",
        "foreign": "c.ckpt: not a checkpoint of sfno_dist",
        "newer": "c.ckpt: checkpoint format 999, this version reads 2; upgrade sfno_dist",
    }
    refused = train(tmp_path, *TINY, f"resume={path}")
    assert_one_line(refused, words[kind])
    if kind in ("absent", "truncated"):
        assert "statistics" not in refused.stderr  # which may take hours
