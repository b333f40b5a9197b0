"""Dropout and noise in Lightning's loop: told each step and micro-batch, and the same where a run is resumed."""

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_archive import archive, everything

from sfno_dist.training.checkpoint import build_model
from sfno_dist.training.module import ForecastModule

SETTINGS = {"name": "SphericalTransformer", "embed_channels": 8, "depth": 1, "num_heads": 2}
SETTINGS |= {"latent_grid": {"kind": "legendre-gauss", "nlat": 6, "nlon": 12}}
SETTINGS |= {"dropout": 0.2, "path_dropout": 0.2, "input_noise": 0.1}


def fit(folder, *, resume=None, start=0, seed=3, **options):
    """The module, and what its model was told at each batch: seed, step, micro-batch and the samples' numbers."""
    data = everything(folder, str(folder / "a.nc"), rollout_steps=1, variables=["t2m", "sst"], prescribed=["z500"])
    data.setup()
    torch.manual_seed(start)
    model, told = build_model(SETTINGS, data.recipe), []
    torch.nn.init.normal_(model.head.weight, std=0.1)
    at = model.randomness.at

    def noted(seed, step, *, micro_batch, samples):
        told.append((seed, step, micro_batch, samples.tolist()))
        at(seed, step, micro_batch=micro_batch, samples=samples)

    model.randomness.at = noted
    module = ForecastModule(
        model, data.recipe, model_settings=SETTINGS, optimizer=lambda g: torch.optim.AdamW(g, lr=1e-3), seed=seed
    )
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, max_epochs=2,
        default_root_dir=folder, num_sanity_val_steps=0, limit_val_batches=0, accumulate_grad_batches=4, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    return module, told


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    archive(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    kept = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    return fit(folder, callbacks=[kept])


def test_the_model_is_told_every_step_and_micro_batch(whole):
    _, told = whole
    parts = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]  # an epoch has 6 batches, the last of them of 3 samples
    assert [words[:3] for words in told[:6]] == [(3, *part) for part in parts]
    assert [words[1:3] for words in told[6:]] == [(step + 2, micro_batch) for step, micro_batch in parts]
    assert [len(words[3]) for words in told] == [4, 4, 4, 4, 4, 3] * 2 and told[0][3] == [0, 1, 2, 3]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_draws_what_the_whole_one_drew(folder, whole, step):
    module, told = whole
    again, rest = fit(folder, resume=folder / f"step={step}.ckpt", start=99, callbacks=[])
    assert rest == told[-len(rest) :] and 0 < len(rest) < len(told)
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_seed_trains_other_weights(folder, whole):
    other, _ = fit(folder, seed=4, callbacks=[])
    assert not torch.equal(other.model.head.weight, whole[0].model.head.weight)


def test_noise_is_on_what_the_model_adds_to_and_not_on_what_it_is_told(whole):
    model = whole[0].model
    assert model.input_noise.channels == whole[0].recipe.state_channels == 2
