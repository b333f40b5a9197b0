"""The order of samples: the same for any number of data replicas, resumed at any of them, each sample once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfno_dist.data import DataError
from sfno_dist.data.sampler import GlobalBatches


def replicas(samples: int, batch_size: int, count: int, **options) -> list[GlobalBatches]:
    """The sampler of each of ``count`` replicas; sample i has the single time i."""
    sequences = np.arange(samples)[:, None]
    return [GlobalBatches(sequences, batch_size, replicas=count, replica=r, **options) for r in range(count)]


def union(samplers: list[GlobalBatches], first: int = 0) -> list[list[int]]:
    """The real samples of each step over all replicas, in order."""
    steps = zip(*samplers, strict=True)
    return [[d.times[0] for part in step for d in part if d.weight > 0] for step in steps][first:]


def flat(steps: list[list[int]]) -> list[int]:
    return [sample for step in steps for sample in step]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_each_step_is_the_same_set_of_samples_for_any_number_of_replicas(samples, batch, count, epoch, shuffle):
    count = min(count, batch)
    alone, shared = (replicas(samples, batch, n, seed=5, shuffle=shuffle) for n in (1, count))
    for sampler in alone + shared:
        sampler.set_epoch(epoch)
    assert union(alone) == union(shared)
    assert sorted(flat(union(shared))) == list(range(samples))
    assert all(len(list(sampler)) == len(sampler) == -(-samples // batch) for sampler in shared)
    for step in zip(*shared, strict=True):
        numbers = [draw.number for part in step for draw in part if draw.weight > 0]
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ten_samples_have_one_mean_on_any_number_of_replicas(count, shuffle):
    """The mean of a batch over its process, then over the processes, as gradients are averaged."""
    samplers = replicas(10, 4, count, shuffle=shuffle)
    means = [
        np.mean([np.mean([d.weight * d.times[0] for d in part]) for part in step])
        for step in zip(*samplers, strict=True)
    ]
    assert np.average(means, weights=[4, 4, 2]) == pytest.approx(4.5)
    real = [d.times[0] for sampler in samplers for part in sampler for d in part if d.weight > 0]
    assert np.mean(real) == 4.5 and len(real) == 10


def test_the_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch):
        (sampler,) = replicas(30, 4, 1, seed=seed, shuffle=True)
        sampler.set_epoch(epoch)
        return union([sampler])

    assert order(1, 2) == order(1, 2)
    assert len({str(order(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 7), st.sampled_from([1, 2, 3, 6]), st.sampled_from([1, 2, 3, 6]), st.sampled_from([6, 4, 12]))
def test_an_epoch_goes_on_with_other_replicas_and_batches(done, before, after, batch):
    first = replicas(40, 6, before, seed=9, shuffle=True)
    done = min(done, len(first[0]))
    for sampler in first:
        sampler.set_epoch(4)
    seen = flat(union(first)[:done])
    second = replicas(40, batch, min(after, batch), seed=9, shuffle=True)
    for sampler in second:
        sampler.load_state_dict(first[0].state_dict(done))
        sampler.set_epoch(4)  # as Lightning does after it loaded
    rest = flat(union(second)) if done < len(first[0]) else []
    assert sorted(seen + rest) == list(range(40))
    whole = [int(i) for i in first[0].order()]
    assert rest == whole[len(seen) :]
    for sampler in second:
        sampler.set_epoch(5)
    assert sorted(flat(union(second))) == list(range(40))


def test_a_second_interruption_counts_from_the_start_of_the_epoch():
    (first,) = replicas(40, 4, 1, shuffle=True)
    (second,) = replicas(40, 4, 1, shuffle=True)
    second.load_state_dict(first.state_dict(3))
    assert len(second) == 10 and len(list(second)) == 7
    assert second.state_dict(5) == first.state_dict(5)


def test_other_samples_in_mid_epoch_are_refused():
    (first,), (second,) = replicas(40, 4, 1), replicas(41, 4, 1)
    with pytest.raises(DataError, match=r"middle of an epoch with samples 40, now there are 41"):
        second.load_state_dict(first.state_dict(3))
    second.load_state_dict(first.state_dict(10))
    assert len(list(second)) == 11


def test_fewer_samples_in_a_batch_than_replicas_are_refused():
    with pytest.raises(DataError, match=r"data\.batch_size .* 3 data replicas .* raise it to 3"):
        replicas(10, 2, 3)
