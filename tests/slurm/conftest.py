"""The cluster that the tests of a process share."""

from collections.abc import Iterator

import pytest

from slurm import cluster as clusters


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    reason = clusters.missing()
    if reason:
        pytest.skip(reason)
    with clusters.running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
