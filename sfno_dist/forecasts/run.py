"""A request for forecasts, fulfilled by all processes of a mesh."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from sfno_dist.comm import whole
from sfno_dist.data import DataError
from sfno_dist.data.calendars import time_text
from sfno_dist.data.failure import raise_everywhere
from sfno_dist.data.samples import FieldReader
from sfno_dist.forecasts import store
from sfno_dist.forecasts.progress import Progress
from sfno_dist.forecasts.rollout import Rollout, Trajectory, trajectories
from sfno_dist.forecasts.store import Layout
from sfno_dist.forecasts.times import check_prescribed, initial_indices, valid_times
from sfno_dist.mesh import ProcessMesh
from sfno_dist.training import checkpoint as checkpoints
from sfno_dist.training.checkpoint import LoadedCheckpoint


@dataclass(frozen=True)
class Request:
    """Forecasts of ``steps`` steps from each of ``inits``, into the file ``output`` (.zarr: a folder, else netCDF).

    Args:
        inits: see ``times.initial_indices``.
        data: files with the initial fields; None: those of the training.
        members: of an ensemble, each from initial fields perturbed by ``perturbation`` times the spread of the variable
            over the training period, drawn from ``seed``; None: one forecast that is not perturbed.
        append: adds initial times to a forecast that is in ``output`` already; else it is replaced.
    """

    checkpoint: str
    output: str
    inits: Sequence[str]
    steps: int = 1
    data: Sequence[str] | None = None
    members: int | None = None
    perturbation: float = 0.1
    seed: int = 0
    append: bool = False

    def __post_init__(self) -> None:
        """``DataError`` for numbers that make no forecast."""
        for name, count in (("steps", self.steps), ("members", self.members if self.members is not None else 1)):
            if count < 1:
                raise DataError(f"a forecast has at least 1 {name[:-1]}, got --{name} {count}")
        if not 0.0 < self.perturbation < float("inf"):
            raise DataError(f"--perturbation is a share of each variable's spread, above 0, got {self.perturbation}")
        if self.seed < 0:
            raise DataError(f"--seed is a whole number of at least 0, got {self.seed}")


def forecast(request: Request, mesh: ProcessMesh, device: torch.device | str = "cpu") -> int:
    """Writes the forecasts; the number of those made. All processes of ``mesh`` call this alike.

    What is written grows in a hidden folder beside the output and takes its name when it is whole; after an
    interruption the same request goes on there, and ends with the same bits. Raises ``ValueError``, one
    line, on all processes alike.
    """
    with mesh.alike() as facts:
        output = checked_output(request.output)
        loaded = checkpoints.load(request.checkpoint, mesh)
        loaded.model.to(device)
        sources = request.data or loaded.data_paths
        reader = FieldReader.of(loaded.recipe, sources)
        facts.update(reader.facts())
        layout, starts = _laid_out(request, loaded, reader, output)
    if not starts:
        return 0
    identity = {**json.loads(layout.attributes["request"]), "initial times": [time_text(t) for t in layout.times[:, 0]]}
    identity["data"] = [str(Path(source).absolute()) for source in sources]
    with Progress(output, mesh) as progress:
        _on_first(mesh, output, lambda: _begin(layout, progress, identity, output=output, new=len(starts)))
        perturbation = request.perturbation if layout.members else 0.0
        asked = trajectories(starts, layout, perturbation=perturbation, seed=request.seed)
        _make([one for one in asked if one.number % mesh.data == mesh.data_index], loaded, reader, layout, progress)
        raise_everywhere(None, mesh)  # all have written theirs
        _on_first(mesh, output, lambda: store.finish(layout, progress.fields, output))
        if mesh.rank == 0:
            progress.end()
    return len(starts)


def checked_output(name: str) -> Path:
    """``DataError`` when a forecast cannot be written there, or would replace something that is none."""
    path = Path(name)
    if not path.absolute().parent.is_dir():
        raise DataError(f"{path}: the folder {path.parent} does not exist; create it first")
    if path.is_dir() and path.suffix != ".zarr":
        raise DataError(f"{path}: is a folder; name a file such as {path / 'forecast.nc'}, or a folder *.zarr to make")
    if path.exists():
        store.open_finished(path)
    return path


def _laid_out(
    request: Request, loaded: LoadedCheckpoint, reader: FieldReader, output: Path
) -> tuple[Layout, list[int]]:
    """What the file will hold, and where in the data the forecasts start that it lacks, the last of its initial times.

    ``DataError`` where a forecast that is there was asked for otherwise.
    """
    recipe = loaded.recipe
    starts = initial_indices(request.inits, reader, recipe.step)
    with open(request.checkpoint, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    identity: dict[str, Any] = {"checkpoint": digest, "steps": request.steps, "members": request.members}
    if request.members:
        identity |= {"perturbation": request.perturbation, "seed": request.seed}
    earlier = np.empty((0, request.steps + 1), reader.times.dtype)
    if request.append and output.exists():
        with store.open_finished(output) as there:
            _refuse_other_request(identity, json.loads(there.attrs["request"]), output)
            earlier = there.time.values
        held = set(recipe.step.ordinals(earlier[:, 0]).tolist())
        ordinals = recipe.step.ordinals(reader.times).tolist()
        starts = [index for index in starts if ordinals[index] not in held]
    new = [valid_times(index, request.steps, reader, recipe.step) for index in starts]
    for times in new:
        check_prescribed(times, reader, recipe)
    attributes = {"Conventions": "CF-1.10", "source": "sfno_dist forecast", "request": json.dumps(identity)}
    return Layout(recipe, np.concatenate([earlier, *(times[None] for times in new)]), request.members or 0,
                  attributes), starts  # fmt: skip


def _refuse_other_request(now: dict[str, Any], then: dict[str, Any], output: Path) -> None:
    for name in {**then, **now}:
        if then.get(name) != now.get(name):
            raise DataError(
                f"{output}: holds forecasts with {name} {then.get(name)}, now it is {now.get(name)}; append with the "
                f"same, or name another output"
            )


def _begin(layout: Layout, progress: Progress, identity: dict[str, Any], *, output: Path, new: int) -> None:
    """Makes the folder in which the fields grow, unless an unfinished forecast of the same request is there."""
    if progress.begin(identity):
        print(f"going on with the unfinished forecast in {progress.folder}", file=sys.stderr)
        return
    store.create(layout, progress.fields)
    if len(layout.times) > new:
        store.adopt(layout, output, progress.fields)
    progress.keep(identity)


def _make(
    mine: list[Trajectory], loaded: LoadedCheckpoint, reader: FieldReader, layout: Layout, progress: Progress
) -> None:
    """The trajectories of this replica, one after the other."""
    mesh = loaded.recipe.mesh
    with mesh.alike() as facts, readable(progress.folder):
        fields = store.Fields(progress.fields, loaded.recipe.outputs)
        done = facts["forecasts that are done"] = [one.number for one in mine if progress.is_done(one.number)]
    steps = layout.times.shape[1] - 1
    bar = tqdm(total=len(mine) * steps, desc="forecast", unit="step", disable=mesh.rank > 0)
    # Disks work while the model does: one thread reads ahead, another writes.
    with bar, ThreadPoolExecutor(1) as reading, ThreadPoolExecutor(1) as writing:
        for one in mine:
            if one.number in done:
                bar.update(steps)
                continue
            with mesh.alike():
                rollout = Rollout(loaded, reader, one)
            writer = Writer(rollout, fields, layout, progress, writing)
            found = progress.found(one.number)
            if found is None:
                writer.write()
            else:
                rollout.go_on_from(*found)
                bar.update(rollout.step)
            ahead = reading.submit(rollout.features, rollout.step)
            while rollout.step < steps:
                with mesh.alike():
                    features = ahead.result()
                if rollout.step + 1 < steps:
                    ahead = reading.submit(rollout.features, rollout.step + 1)
                rollout.advance(features)
                writer.write()
                bar.update()
            writer.wait()
            if mesh.place == 0:
                progress.done(one.number)


class Writer:
    """Of one forecast: what each of its steps leaves on disk, written by a thread of its own."""

    def __init__(
        self, rollout: Rollout, fields: store.Fields, layout: Layout, progress: Progress, thread: ThreadPoolExecutor
    ) -> None:
        self.rollout, self.fields, self.layout, self.progress = rollout, fields, layout, progress
        self._thread, self._written, self._warned = thread, Future[None](), False
        self._written.set_result(None)

    def write(self) -> None:
        """The fields, each whole by one of the processes, then the state to go on from.

        Returns once the step before is on disk. All processes of the globe call this alike.
        """
        rollout, recipe = self.rollout, self.rollout.loaded.recipe
        writers = [v % recipe.mesh.globe_size for v in range(recipe.out_channels)]
        globes = whole(rollout.fields(), recipe.tile, at=writers)
        self.wait()
        self._written = self._thread.submit(self._store, globes, rollout.step, rollout.state)
        self._warn_of_infinities()

    def wait(self) -> None:
        """Until all is on disk; an error that is raised on all processes of the globe where it is not."""
        with self.rollout.loaded.recipe.mesh.alike(), readable(self.progress.folder):
            self._written.result()

    def _store(self, globes: dict[int, Tensor], step: int, state: Tensor) -> None:
        number = self.rollout.trajectory.number
        init, member = divmod(number, self.layout.members or 1)
        place = (init, step, member) if self.layout.members else (init, step)
        for v, globe in globes.items():
            self.fields.write(v, place, globe.numpy())
        self.progress.save(number, step, state)

    def _warn_of_infinities(self) -> None:
        rollout = self.rollout
        finite = torch.isfinite(rollout.state).all(-1).all(-1)
        if not self._warned and not finite.all():
            self._warned = True
            name = rollout.loaded.recipe.outputs[int(finite.int().argmin())]
            start = time_text(rollout.trajectory.times[0])[:16]
            tqdm.write(f"warning: from {start}, {name} is no finite number after step {rollout.step}", file=sys.stderr)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Errors of the disk as ``DataError``, with what to do."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be written or read ({error.strerror or error}); mend it and give the same command again, "
            f"which goes on from there"
        ) from error


def _on_first(mesh: ProcessMesh, output: Path, work: Callable[[], None]) -> None:
    """``work`` on the first process of all, while the others wait; its error is raised on all of them."""
    problem = None
    if mesh.rank == 0:
        try:
            with readable(output):
                work()
        except DataError as error:
            problem = str(error)
    raise_everywhere(problem, mesh)
