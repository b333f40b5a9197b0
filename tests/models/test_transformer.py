"""The model: shapes, start, gradients, and the symmetries that it keeps."""

import pytest
import torch

from sfno_dist import Grid, SphericalTransformer

GRID, LATENT = Grid("equiangular", 13, 24), Grid("legendre-gauss", 6, 12)


def small_model(**options) -> SphericalTransformer:
    settings = {"embed_channels": 8, "depth": 2, "num_heads": 2, **options}
    return SphericalTransformer(5, 2, GRID, LATENT, **settings)


def test_an_untrained_model_predicts_no_change():
    assert torch.equal(small_model()(torch.randn(3, 5, 13, 24)), torch.zeros(3, 2, 13, 24))


def test_every_weight_takes_part():
    model = small_model()
    torch.nn.init.normal_(model.head.weight)
    model(torch.randn(1, 5, 13, 24)).square().sum().backward()
    assert all(
        p.grad is not None and p.grad.abs().sum() > 0 for name, p in model.named_parameters() if "k_bias" not in name
    )
    # A constant added to every key cancels in the softmax, unless keys are normalised.
    assert model.down.k_bias.grad.abs().max() < 1e-4


def test_blocks_computed_again_give_the_same_gradients_to_the_bit_and_keep_less():
    kept, gradients = [], []
    for again in (False, True):
        torch.manual_seed(1)
        model = small_model(recompute_blocks=again)
        torch.nn.init.normal_(model.head.weight)
        x, held = torch.randn(2, 5, 13, 24), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t.numel()) or t, lambda t: t):
            y = model(x)
        kept.append(sum(held))
        y.square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert kept[1] < 0.8 * kept[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_samples_of_a_batch_do_not_meet():
    model = small_model()
    torch.nn.init.normal_(model.head.weight)
    x = torch.randn(3, 5, 13, 24)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]), rtol=1e-4, atol=1e-5)


def test_a_point_is_heard_as_far_as_the_attention_reaches():
    model = small_model(depth=1).double()
    torch.nn.init.normal_(model.head.weight)
    x = torch.randn(1, 5, 13, 24, dtype=torch.float64)
    changed = x.clone()
    changed[0, :, 0, 0] += 1.0  # at the north pole
    moved = (model(changed) - model(x)).abs().sum(1)[0]
    assert moved[0].min() > 0 and moved[4:].max() < moved[0].max()
    reach = model.down.neighbourhood.theta_cutoff + model.blocks[0].attention.neighbourhood.theta_cutoff
    reach += model.up.neighbourhood.theta_cutoff
    beyond = torch.tensor(GRID.colatitudes) > 1.002 * reach
    assert beyond.any() and moved[beyond].max() == 0.0


def test_depth_and_width_are_what_is_asked_for():
    assert len(small_model(depth=3).blocks) == 3
    assert small_model(embed_channels=16, mlp_ratio=4.0).blocks[0].mlp.expand.out_features == 64


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ValueError, match="num_heads=3 does not divide"):
        small_model(num_heads=3)
