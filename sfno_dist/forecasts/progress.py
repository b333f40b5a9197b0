"""What an unfinished forecast has beside its fields: the request, the states to go on from, and what is done.

All of it lies in ``.NAME.partial`` beside the output, so that the same command goes on where a killed one was.
"""

from __future__ import annotations

import fcntl
import json
import pickle
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sfno_dist.data import DataError
from sfno_dist.data.output import whole_or_nothing
from sfno_dist.mesh import ProcessMesh


class Progress:
    """In ``folder``, of the process at ``mesh.rank``; the first process makes the folder with ``begin``.

    A context: at its end another command may go on.
    """

    def __init__(self, output: Path, mesh: ProcessMesh) -> None:
        self.folder = output.absolute().parent / f".{output.name}.partial"
        self.mesh = mesh
        self._lock: IO | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def fields(self) -> Path:
        return self.folder / "forecast.zarr"

    def begin(self, request: Mapping[str, Any]) -> bool:
        """Locks the folder for this command; whether an unfinished forecast of the same request is there.

        ``DataError`` where another command writes it, and where what is there was asked for otherwise.
        """
        self.folder.mkdir(exist_ok=True)
        self._lock = open(self.folder / "lock", "w")  # noqa: SIM115  held until this context ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"{self.folder}: another command is writing this forecast; wait for it") from None
        except OSError:
            pass  # a file system without locks
        stored = self.folder / "request.json"
        earlier = json.loads(stored.read_text()) if stored.exists() and self.fields.exists() else None
        made = any(left.name.startswith(("done_", "state_")) for left in self.folder.iterdir())
        if earlier is None or (earlier != request and not made):
            for left in self.folder.iterdir():  # of a command that ended as it began, or was killed at its very end
                if left.name != "lock":
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
            return False
        for name in {**earlier, **request}:
            if earlier.get(name) != request.get(name):
                raise DataError(
                    f"{self.folder} holds an unfinished forecast with {name} {earlier.get(name)}, now it is "
                    f"{request.get(name)}: give the same command to go on with it, or remove it with "
                    f"'rm -r {shlex.quote(str(self.folder))}'"
                )
        return True

    def keep(self, request: Mapping[str, Any]) -> None:
        """Once the fields can be written: from now on the same request goes on."""
        with whole_or_nothing(self.folder / "request.json") as partial:
            partial.write_text(json.dumps(request))

    def end(self) -> None:
        shutil.rmtree(self.folder)

    def is_done(self, number: int) -> bool:
        return (self.folder / f"done_{number}").exists()

    def done(self, number: int) -> None:
        (self.folder / f"done_{number}").touch()

    def save(self, number: int, step: int, state: Tensor) -> None:
        """The newest two are kept, as one process may be killed before another has saved the same step."""
        with whole_or_nothing(self._path(step), overwrite=True) as partial:
            torch.save({"number": number, "step": step, "layout": self._layout, "state": state}, partial)

    def found(self, number: int) -> tuple[int, Tensor] | None:
        """(step, state) of a trajectory, the last that all processes of the globe have; they all call this alike.

        None where there is none, also of another layout of processes, whose tiles are others.
        """
        held = {}
        for path in (self._path(0), self._path(1)):
            try:
                stored = torch.load(path, weights_only=True)
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
                continue
            if stored["number"] == number and stored["layout"] == self._layout:
                held[stored["step"]] = stored["state"]
        common = set(held)
        if self.mesh.globe_size > 1:
            everybody: list[Any] = [None] * self.mesh.globe_size
            dist.all_gather_object(everybody, common, group=self.mesh.groups.control)
            common = set.intersection(*everybody)
        return (max(common), held[max(common)]) if common else None

    @property
    def _layout(self) -> list:
        return [*self.mesh.sizes, self.mesh.row_balance]

    def _path(self, step: int) -> Path:
        return self.folder / f"state_{self.mesh.rank}_{step % 2}.pt"
