"""What all tests share."""

import os
from pathlib import Path

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Parallel test processes share the cores instead of fighting for them.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    threads = max(1, (os.cpu_count() or 1) // workers)
    torch.set_num_threads(threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the commands that tests start


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # A machine with a GPU may have no more than PyTorch: `-m gpu` imports only the files that have such tests.
    asked = config.getoption("markexpr") == "gpu" and collection_path.suffix == ".py"
    return True if asked and "pytest.mark.gpu" not in collection_path.read_text() else None


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip("no CUDA device here"))
