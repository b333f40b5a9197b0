"""What a training step costs by process layout, and what Lightning adds to a loop written by hand.

    python benchmarks/training.py                 layouts of 1, 2 and 4 processes, and the loop by hand; minutes
    python benchmarks/training.py --csv PATH      also writes the numbers

Each layout is ``python train.py mesh=...`` on the embedded data, every process with one thread. Times are medians over
the steps after the first five. Waiting is what a process cannot work in: for data, for the transfers of the exchanges,
for agreements on what the processes do, and for the last gradients after its own backward is done. Memory is what a
training adds to the peak of a process, of the largest one.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from table import Table

from sfno_dist.mesh import agreement

ROOT = Path(__file__).resolve().parents[1]
LAYOUTS = ((1, 1), (1, 2), (2, 1), (2, 2))
SIZE = ["grid.latent.nlat=64", "grid.latent.nlon=128", "model.embed_channels=64", "data.batch_size=1", "seed=0"]
WARM, STEPS = 5, 20
MEBI = 2**20


class Clock(lightning.Callback):
    """Writes the times of each step of this process to ``folder``."""

    def __init__(self, folder: str) -> None:
        self.folder, self.steps, self.waited = Path(folder), [], 0.0

    def on_fit_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self.memory = resident()
        self.start_transfers = dist.batch_isend_irecv
        dist.batch_isend_irecv = self.transfers
        wait_to_agree = agreement._wait
        agreement._wait = lambda *arguments: self.timed(wait_to_agree, *arguments)
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.note_gradient)
        self.ended = time.perf_counter()

    def transfers(self, operations: list[dist.P2POp]) -> list:
        return [Waited(work, self) for work in self.start_transfers(operations)]

    def timed(self, wait: Callable, *arguments) -> object:
        start = time.perf_counter()
        try:
            return wait(*arguments)
        finally:
            self.waited += time.perf_counter() - start

    def note_gradient(self, parameter: torch.Tensor) -> None:
        self.last_gradient = time.perf_counter()

    def on_train_batch_start(self, *_) -> None:
        self.started, self.waited, self.of_data = time.perf_counter(), 0.0, time.perf_counter() - self.ended

    def on_after_backward(self, *_) -> None:
        self.of_gradients = time.perf_counter() - self.last_gradient

    def on_train_batch_end(self, *_) -> None:
        self.ended = time.perf_counter()
        step = self.ended - self.started + self.of_data
        self.steps.append({"step": step, "data": self.of_data, "exchange": self.waited, "gradients": self.of_gradients})

    def on_fit_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result = {"steps": self.steps[WARM:], "memory": peak - self.memory}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(result))


class Waited:
    """A transfer of which the time of waiting is counted."""

    def __init__(self, work: dist.Work, clock: Clock) -> None:
        self.work, self.clock = work, clock

    def wait(self, *arguments) -> object:
        return self.clock.timed(self.work.wait, *arguments)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def layout_row(polar: int, azimuth: int) -> dict[str, object]:
    """Medians over steps and processes of ``python train.py`` on one layout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "train.py", f"mesh.polar={polar}", f"mesh.azimuth={azimuth}", *SIZE]
        command += [f"hydra.run.dir={folder}/run", "trainer.max_epochs=1", "trainer.num_sanity_val_steps=0"]
        command += [f"+trainer.limit_train_batches={WARM + STEPS}", "+trainer.limit_val_batches=0"]
        command += ["+trainer.limit_test_batches=1", "logger=csv"]
        command += ["+callbacks.clock._target_=training.Clock", f"+callbacks.clock.folder={folder}"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'benchmarks'}:{ROOT}", "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    assert len(ranks) == polar * azimuth
    medians = {
        name: statistics.median(step[name] for rank in ranks for step in rank["steps"])
        for name in ("step", "data", "exchange", "gradients")
    }
    waits = {name: 100 * medians[name] / medians["step"] for name in ("data", "exchange", "gradients")}
    memory = max(rank["memory"] for rank in ranks) / MEBI
    return {"layout": f"{polar}x{azimuth}", "ms": 1000 * medians["step"], **waits, "memory": memory}


def by_hand_against_lightning() -> dict[str, float]:
    """Milliseconds of a step by a plain loop and by the Trainer as train.py sets it up, in turn; medians."""
    from hydra import compose, initialize_config_dir

    from sfno_dist.training.run import assemble, build_mesh

    torch.set_num_threads(1)
    os.environ["SFNO_DIST_ROOT"] = str(ROOT)
    times: dict[str, list[float]] = {"hand": [], "lightning": []}
    with tempfile.TemporaryDirectory() as folder, initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        limits = ["+trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0", "name=benchmark"]
        config = compose("train", [f"paths.output={folder}", f"trainer.max_steps={STEPS}", *SIZE, *limits])
        quiet = contextlib.redirect_stderr(io.StringIO())  # the progress bar is drawn, but not shown
        for _ in range(4):
            data, module, trainer = assemble(config, build_mesh(config))
            times["hand"] += loop_by_hand(data, module, float(config.trainer.gradient_clip_val))
            data, module, trainer = assemble(config, build_mesh(config))
            clock = Clock(folder)
            trainer.callbacks.append(clock)
            with quiet, contextlib.redirect_stdout(io.StringIO()):
                trainer.fit(module, datamodule=data)
            times["lightning"] += [step["step"] for step in clock.steps[WARM:]]
    return {name: 1000 * statistics.median(values) for name, values in times.items()}


def loop_by_hand(data, module, clip: float) -> list[float]:
    """Seconds of each step: the same batches, model, loss, optimiser, schedule and clipping."""
    optimizer = module.make_optimizer([{"params": list(module.parameters())}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    seconds, batches = [], iter(data.train_dataloader())
    for number in range(STEPS):
        start = time.perf_counter()
        batch = next(batches)
        module.model.randomness.at(0, number, samples=batch["number"])
        means = module.area_means(module(batch), batch)
        loss = (means * module.weights).mean((1, 2)) @ batch["weight"] / len(means)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        schedule.step()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    print(f"\nStrong scaling on {cores} cores, one thread for each process\n")
    columns = (
        ("polar x azimuth", "layout", "s"), ("ms/step", "ms", ".0f"), ("speed-up", "speedup", ".2f"),
        ("of the cores", "efficiency", ".0%"), ("waits for data", "data", ".1f"), ("exchanges", "exchange", ".1f"),
        ("gradients %", "gradients", ".1f"), ("MiB/process", "memory", ".0f"),
    )  # fmt: skip
    table, alone = Table(columns, options.csv), None
    for polar, azimuth in LAYOUTS:
        row = layout_row(polar, azimuth)
        alone = alone or row["ms"]
        speedup = alone / row["ms"]
        table.add({**row, "speedup": speedup, "efficiency": speedup / min(polar * azimuth, cores)})
    both = by_hand_against_lightning()
    added = 100 * (both["lightning"] / both["hand"] - 1)
    print(f"\nOne process, ms per step: by hand {both['hand']:.1f}, Lightning {both['lightning']:.1f} ({added:+.1f} %)")


if __name__ == "__main__":
    main()
