"""The certificate passes layouts that change nothing, and names what a planted fault changes first."""

import functools

import pytest
import torch
from training.commands import ROOT, sfno_dist

from sfno_dist import cli
from sfno_dist.training import certificate, compose
from sfno_dist.training.certificate import Certificate, StepDifferences, verify

TINY = ["experiment=smoke", "grid.latent.nlat=6", "grid.latent.nlon=12", "model.embed_channels=8"]
RANDOM = ["model.dropout=0.1", "model.path_dropout=0.2", "model.input_noise=0.1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "tolerance"),
    [
        (["mesh=polar2_azimuth2", "trainer.accumulate_grad_batches=2", *RANDOM], 1e-10),
        # One replica has two samples and the other one, whose weights 4/3 and 2/3 are rounded.
        (["mesh=data2", "mesh.azimuth=2", "mesh.exchange=ring", "data.batch_size=3", *RANDOM], 1e-6),
        (["mesh.polar=3", "mesh.row_balance=work", "trainer.gradient_clip_val=0.1"], 1e-10),
    ],
    ids=["tiles", "replicas of tiles", "uneven rows"],
)
def test_layouts_change_nothing(overrides, tolerance):
    found = verify([*TINY, *overrides], steps=2, tolerance=tolerance)
    assert found.fault is None
    assert len(found.steps) == 2 and all(step.norms[0] > 0 and step.losses[0] > 0 for step in found.steps)
    assert len(found.steps[0].weights) == len(found.steps[0].gradients) > 30


def not_summed(replicas, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def averaged(replicas, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = torch.distributed.all_reduce(bucket.buffer().div_(torch.distributed.get_world_size()), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def hook(wrong):
    from sfno_dist.training import strategy

    strategy.summed_over_tiles = wrong


def one_parameter_left_out():
    from sfno_dist.training.strategy import GlobeStrategy

    wrap = GlobeStrategy._setup_model

    def without(self, model):
        names = model._ddp_params_and_buffers_to_ignore
        model._ddp_params_and_buffers_to_ignore = {*names, "model.blocks.0.mlp.expand.bias"}
        return wrap(self, model)

    GlobeStrategy._setup_model = without


def mean_over_the_tile():
    from sfno_dist.training.module import ForecastModule

    plain = ForecastModule.__init__

    def means(self, *arguments, **options):
        plain(self, *arguments, **options)
        # shares[h] of this tile's points add up to 1 over the tile
        self.shares = self.shares / (self.shares.sum() * self.recipe.tile.tile_shape[1])

    ForecastModule.__init__ = means


def halo_one_column_off():
    from sfno_dist.comm import halo

    plain = halo.Arriving.finish
    halo.Arriving.finish = lambda self: tuple(field.roll(1, 1) for field in plain(self))


def halo_whose_gradients_do_not_come_home():
    from sfno_dist.comm import halo

    plain = halo.Returning.finish

    def without(self, own):
        plain(self, own)
        return tuple(own)

    halo.Returning.finish = without


def masks_that_start_anew_on_each_tile():
    from sfno_dist.layers.randomness import Dropout

    plain = Dropout.__init__

    def from_zero(self, *arguments, **options):
        plain(self, *arguments, **options)
        self.rows -= self.rows.clone()[0]

    Dropout.__init__ = from_zero


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "first"),
    [
        (functools.partial(hook, not_summed), "the gradient of model.lift.weight"),
        (functools.partial(hook, averaged), "the gradient of model.lift.weight"),
        (one_parameter_left_out, "the gradient of model.blocks.0.mlp.expand.bias"),
        (mean_over_the_tile, "the gradient of model.lift.weight"),
        (halo_one_column_off, "the gradient of model.lift.weight"),
        (halo_whose_gradients_do_not_come_home, "the gradient of model.lift.weight"),
        (masks_that_start_anew_on_each_tile, "the gradient of model.lift.weight"),
    ],
    ids=["not summed", "averaged", "one left out", "mean over the tile", "wrong halo", "not back", "masks of tiles"],
)
def test_planted_faults_are_found(fault, first):
    found = verify([*TINY, "mesh.polar=2", "model.dropout=0.1"], steps=1, in_each_process=fault)
    assert f"at step 1 {first} differs by" in found.fault
    loss, other = found.steps[0].losses
    of_loss = fault in (mean_over_the_tile, halo_one_column_off, masks_that_start_anew_on_each_tile)
    assert (abs(loss - other) > 1e-4 * loss) == of_loss
    assert ("the loss by" in found.fault) == of_loss


def fails():
    raise ValueError("no such luck")


@pytest.mark.slow
def test_a_process_that_fails_ends_it_in_one_line():
    with pytest.raises(ValueError, match=r"process [01] of 2: .*no such luck"):
        verify([*TINY, "mesh=azimuth2"], steps=1, in_each_process=fails)


@pytest.mark.slow
def test_the_command_prints_loss_norm_and_every_parameter(tmp_path):
    done = sfno_dist(tmp_path, "verify-layout", "mesh=azimuth2", *TINY)
    assert done.returncode == 0, done.stderr
    assert "the layout changes nothing" in done.stdout and "gradient norm" in done.stdout
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("model.up.v_weights")]
    assert len(row) == 7 and all(float(cell) < 1e-9 for cell in row[1:])
    assert list(tmp_path.iterdir()) == []


def example(weight, loss=1.0):
    good = StepDifferences((1.0, 1.0), (2.0, 2.0), {"a": 0.0, "b": 1e-16}, {"a": 0.0, "b": 0.0, "c": 0.0})
    bad = StepDifferences((1.0, loss), (2.0, 2.0), {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": weight, "c": weight})
    return Certificate("1 x 2 x 1", 1e-7, [good, bad])


def test_a_difference_ends_the_command_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(certificate, "verify", lambda *_, **__: example(0.01))
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify-layout", "mesh=azimuth2"])
    assert ended.value.code == 1
    output, error = capsys.readouterr()
    assert "at step 2 the weight b differs by 1.0e-02, 1 others too" in error and len(error.splitlines()) == 1
    (row,) = [line.split() for line in output.splitlines() if line.startswith("c ")]
    assert row == ["c", "frozen", "frozen", "0.0e+00", "1.0e-02"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (example(0.0), None),
        (example(1e-8), None),
        (example(float("inf")), "the weight b"),
        (example(0.0, 1.1), "the loss by"),
        (example(0.0, float("nan")), "the loss by inf"),
    ],
)
def test_what_counts_as_a_difference(found, words):
    assert found.fault is None if words is None else words in found.fault


def test_differences_are_relative_to_the_largest_value_or_a_share_of_the_largest_of_all():
    one = {"large": torch.tensor([100.0, -1.0]), "small": torch.tensor([1e-9]), "zero": torch.zeros(1)}
    mine = {"large": torch.tensor([100.0, -2.0]), "small": torch.tensor([1.0]), "zero": torch.zeros(1)}
    assert certificate._differences(one, mine) == {"large": 0.01, "small": pytest.approx(1.0), "zero": 0.0}
    mine = {"large": torch.tensor([float("nan"), 0.0]), "zero": torch.zeros(1), "more": torch.zeros(1)}
    inf = float("inf")
    assert certificate._differences(one, mine) == {"large": inf, "small": inf, "zero": 0.0, "more": inf}
    assert certificate._differences({"zero": torch.zeros(2)}, {"zero": torch.ones(2)}) == {"zero": inf}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["mesh=single"], "one process, so there is nothing to compare"),
        (["mesh=polar7"], "polar7"),
        (["mesh.polar=2", "trainer.devices=3"], "trainer.devices=3"),
        (["mesh.polar=2", "trainer.precision=16-mixed"], "verify-layout decides trainer.precision itself"),
        (["mesh.polar=2", "+trainer.max_steps=5"], "verify-layout decides trainer.max_steps itself"),
        (["mesh.polar=2", "callbacks.checkpoint.monitor=x"], "verify-layout decides callbacks.checkpoint.monitor"),
        (["mesh.polar=2", "model.width=3"], "width"),
        (["mesh.polar=2", "data=era5"], "data.paths"),
        (["mesh.polar=2", "--steps", "0"], "--steps must be at least 1"),
        (["mesh.polar=2", "--tolerance", "0"], "--tolerance is a relative difference"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify-layout", *arguments])
    error = capsys.readouterr().err
    assert ended.value.code == 1 and words in error and len(error.splitlines()) == 1, error


def test_the_configuration_is_that_of_the_folder_it_is_told_or_given_in(monkeypatch, tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "train.yaml").write_text("{}")
    monkeypatch.setenv("SFNO_DIST_ROOT", str(ROOT))
    monkeypatch.chdir(tmp_path)
    assert compose._root() == ROOT
    monkeypatch.delenv("SFNO_DIST_ROOT")
    assert compose._root() == tmp_path
    monkeypatch.setenv("SFNO_DIST_ROOT", str(tmp_path / "conf"))
    with pytest.raises(ValueError, match="set SFNO_DIST_ROOT to it"):
        verify(["mesh.polar=2"])
