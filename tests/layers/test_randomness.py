"""What layers draw: published vectors, distributions, independence, and one mask from forward to backward."""

import itertools
import shutil

import pytest
import torch
from scipy import stats
from torch.utils.checkpoint import checkpoint

from sfno_dist import Grid, ProcessMesh, SphericalTransformer
from sfno_dist.layers import Dropout, Noise, PathDropout, Randomness
from sfno_dist.layers.philox import philox, uniform

GRID = Grid("equiangular", 37, 72)
SMALL, LATENT = Grid("equiangular", 13, 24), Grid("legendre-gauss", 6, 12)


def moment(field, seed=7, step=3, applied=0, **at):
    randomness = Randomness(ProcessMesh())
    randomness.at(seed, step, **at)
    return [randomness.next(field) for _ in range(applied + 1)][-1]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # of Random123, the authors' library: kat_vectors, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_the_published_ones(counter, key, words):
    got = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert [int(word) for word in got] == words


def test_words_are_uniform():
    numbers, zero = torch.arange(20_000), torch.tensor(0)
    for words in philox((numbers, zero, zero, zero), (zero + 1, zero)):
        counts = torch.histc(uniform(words), 64, 0.0, 1.0)
        assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_uniform_numbers_never_reach_the_ends():
    ends = uniform(torch.tensor([0, 2**32 - 1]))
    assert ends.min() > 0.0 and ends.max() < 1.0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_leaves_out_its_share_everywhere_and_keeps_the_mean(rate):
    field = torch.ones(3, 6, *GRID.shape)
    y = Dropout(rate, GRID, place=1)(field, moment(field))
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1.0) / (1.0 - rate))}
    dropped = (y == 0).float()
    for dims in ((0, 1, 2, 3), (1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):  # all; of each sample, channel, row, column
        share = dropped.mean(dims)
        sigma = (rate * (1 - rate) / (dropped.numel() / share.numel())) ** 0.5
        assert ((share - rate).abs() < 4.5 * sigma).all()


def test_noise_is_normal_with_its_deviation_and_only_on_the_state():
    field = torch.zeros(2, 7, *GRID.shape)
    noise = Noise(0.25, 5, GRID, place=0)(field, moment(field))
    assert torch.equal(noise[:, 5:], field[:, 5:])
    for channel in noise[:, :5].transpose(0, 1):
        assert stats.kstest(channel.flatten().numpy() / 0.25, "norm").pvalue > 1e-3
    values, n = noise[:, :5].flatten().double().numpy() / 0.25, noise[:, :5].numel()
    assert abs(values.mean()) < 4 * n**-0.5 and abs(values.var() - 1) < 4 * (2 / n) ** 0.5
    assert abs(stats.skew(values)) < 4 * (6 / n) ** 0.5 and abs(stats.kurtosis(values)) < 4 * (24 / n) ** 0.5


def test_places_moments_samples_channels_and_neighbouring_cells_are_independent():
    field = torch.zeros(2, 4, *GRID.shape)

    def drawn(place=1, **at):
        return Noise(1.0, 4, GRID, place=place)(field, moment(field, **at))

    base = drawn()
    others = [drawn(place=2), drawn(step=4), drawn(seed=8), drawn(seed=7 + 2**32), drawn(micro_batch=1)]
    others += [drawn(applied=1), drawn(step=2, micro_batch=1), drawn(samples=torch.tensor([2, 3]))]
    others += [base.roll(1, dim) for dim in range(4)] + [base.roll((1, -1), (2, 3))]
    for one, other in itertools.combinations([base, *others], 2):
        pair = torch.stack([one.flatten(), other.flatten()])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.5 * base.numel() ** -0.5


def test_the_same_moment_draws_the_same_whatever_was_drawn_before_and_in_whatever_batch():
    field = torch.randn(4, 5, *SMALL.shape)
    layer = Dropout(0.3, SMALL, place=1)
    y = layer(field, moment(field))
    torch.manual_seed(99)
    assert torch.equal(layer(field, moment(field)), y)
    some = torch.tensor([3, 1])
    assert torch.equal(layer(field[some], moment(field[some], samples=some)), y[some])
    assert not torch.equal(layer(field, moment(field, step=4)), y)


def test_a_path_is_left_out_for_whole_samples():
    branch = torch.randn(4000, 2, 3, 4)
    y = PathDropout(0.3, place=2)(branch, moment(branch))
    dropped = (y == 0).flatten(1).all(1)
    torch.testing.assert_close(y[~dropped], branch[~dropped] / 0.7)
    assert abs(float(dropped.float().mean()) - 0.3) < 4 * (0.21 / 4000) ** 0.5


def test_backward_uses_the_mask_of_forward():
    x = torch.randn(2, 5, *SMALL.shape, dtype=torch.float64, requires_grad=True)
    for layer in (Dropout(0.4, SMALL, place=1), PathDropout(0.4, place=1), Noise(0.1, 3, SMALL, place=1)):
        now = moment(x)
        assert torch.autograd.gradcheck(lambda x, layer=layer, now=now: layer(x, now), x, fast_mode=True)


def model(**settings):
    torch.manual_seed(0)
    made = SphericalTransformer(5, 2, SMALL, LATENT, embed_channels=8, depth=2, num_heads=2, **settings)
    torch.nn.init.normal_(made.head.weight)
    return made


RANDOM = {"dropout": 0.2, "path_dropout": 0.3, "input_noise": 0.1, "state_channels": 2}


@pytest.mark.parametrize("name", ["dropout", "path_dropout", "input_noise"])
def test_each_setting_draws_in_training_and_is_nothing_in_evaluation(name):
    field = torch.randn(4, 5, *SMALL.shape)
    plain, random = model(), model(**{name: RANDOM[name]})
    random.randomness.at(seed=1, step=0)
    assert not torch.equal(random(field), plain(field))
    random.eval()
    assert torch.equal(random(field), plain(field))
    assert random.state_dict().keys() == plain.state_dict().keys()


def test_layers_of_a_model_draw_for_themselves():
    made = model(**RANDOM)
    places = [layer.place for layer in made.modules() if hasattr(layer, "place")]
    assert sorted(places) == list(range(7))


def test_each_application_of_a_step_draws_anew_and_the_step_again_draws_the_same():
    field, made = torch.randn(2, 5, *SMALL.shape), model(**RANDOM)
    made.randomness.at(seed=1, step=5)
    first, second = made(field), made(field)
    assert not torch.equal(first, second)
    made.randomness.at(seed=1, step=5)
    assert torch.equal(made(field), first) and torch.equal(made(field), second)


def test_activation_checkpoints_draw_the_same_a_second_time():
    """Of blocks in a rollout of two applications: the first is computed again after the second has drawn."""
    field = torch.randn(2, 5, *SMALL.shape)
    gradients = []
    for checkpointed in (False, True):
        made = model(**RANDOM)
        for block in made.blocks if checkpointed else ():
            whole = block.forward
            block.forward = lambda *inputs, whole=whole: checkpoint(whole, *inputs, use_reentrant=False)
        made.randomness.at(seed=1, step=5)
        (made(field) * made(field)).sum().backward()
        gradients.append([p.grad for p in made.parameters()])
    for plain, again in zip(*gradients, strict=True):
        assert torch.equal(plain, again)


def test_a_compiled_model_draws_the_same_and_is_not_compiled_for_each_step():
    field, made = torch.randn(2, 5, *SMALL.shape), model(**RANDOM)
    compiled = torch.compile(made, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in (5, 6, 7):
            made.randomness.at(seed=1, step=step)
            drawn = compiled(field), compiled(field)
            made.randomness.at(seed=1, step=step)
            for one in drawn:
                torch.testing.assert_close(one, made(field), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_words_in_compiled_code_are_those_of_the_interpreter():
    """Keys beyond 2**31 among them: a compiler may take signed numbers that overflow for anything."""
    layer, randomness, field = Dropout(0.3, SMALL, place=1), Randomness(ProcessMesh()), torch.randn(2, 5, *SMALL.shape)

    def drawn(field):
        moment = randomness.next(field)
        return moment.key, layer(field, moment) == 0

    compiled, keys = torch.compile(drawn), []
    for step in range(6):
        results = []
        for function in (drawn, compiled):
            randomness.at(5, step)
            results.append(function(field))
        keys += map(int, results[0][0])
        assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert min(keys) < 2**31 < max(keys)


def test_a_model_that_was_not_told_the_step_says_so():
    field, made = torch.randn(2, 5, *SMALL.shape), model(dropout=0.1)
    with pytest.raises(ValueError, match=r"model.randomness.at\(seed, step\)"):
        made(field)
    made.randomness.at(seed=1, step=0, samples=torch.arange(3))
    with pytest.raises(ValueError, match="3 samples, the batch has 2"):
        made(field)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dropout": 1.0}, "dropout is a probability"),
        ({"path_dropout": -0.1}, "path_dropout is a probability"),
        ({"dropout": "often"}, "got 'often'"),
        ({"input_noise": -1.0}, "input_noise is a standard deviation"),
    ],
)
def test_impossible_rates_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        model(**settings)
