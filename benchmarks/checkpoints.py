"""What it costs to read a checkpoint back before it gets its name.

    python benchmarks/checkpoints.py [--folder F]

Beside ``torch.save`` alone, which neither waits for the disk nor looks at it. Of some rounds the fastest counts.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sfno_dist.training import checkpoint_io

ROUNDS, MEGABYTES = 3, (1, 10, 100, 1000)


def fastest(work: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def row(megabytes: int, folder: Path) -> str:
    checkpoint = {f"layer{n}": torch.randn(megabytes * 2500) for n in range(100)}
    path = folder / checkpoint_io.LAST
    plain = fastest(lambda: torch.save(checkpoint, folder / "plain.ckpt"))
    to_disk = fastest(lambda: checkpoint_io._write(checkpoint, path))
    back = fastest(lambda: checkpoint_io.damage(path))
    whole = fastest(lambda: checkpoint_io.VerifiedCheckpointIO().save_checkpoint(checkpoint, path))
    return f"| {megabytes} | {plain:.3f} | {to_disk:.3f} | {back:.3f} | {whole:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", help="on the disk to measure (default: that of temporary files)")
    with tempfile.TemporaryDirectory(dir=parser.parse_args().folder) as folder:
        print("| MB | torch.save s | and to the disk | checksums read back | whole, with renames |")
        print("|---|---|---|---|---|")
        for megabytes in MEGABYTES:
            print(row(megabytes, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
