"""The ``sfno-dist`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfno_dist.mesh import ProcessMesh

TRACEBACK = "SFNO_DIST_TRACEBACK"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an error that the user can mend into one line on standard error and exit status 1.

    With SFNO_DIST_TRACEBACK=1 in the environment the whole traceback is shown instead.
    """
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get(TRACEBACK) or (isinstance(error, RuntimeError) and not _is_lost_process(error)):
            raise
        # A DataLoader worker sends its error with the traceback before it; the last line says what happened.
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        text = lines[-1].split("Error: ", 1)[-1] if lines[0].startswith("Caught ") else " ".join(lines)
        line = f"error: {' '.join(text.split())}"
        if _first_to_say(line):
            print(line, file=sys.stderr)
        sys.exit(1)


def _is_lost_process(error: RuntimeError) -> bool:
    from sfno_dist.mesh import ProcessLostError

    return isinstance(error, ProcessLostError)


def _first_to_say(line: str) -> bool:
    """Of all processes of a training, as most errors come to all of them."""
    from sfno_dist.training.launch import first_to_say

    return first_to_say(line)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    options.words = sys.argv[1:] if arguments is None else list(arguments)
    with one_line_errors():
        options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sfno-dist", description="Data sets, forecasts from checkpoints that train.py wrote, and their scores."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('sfno-dist')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    forecast = commands.add_parser("forecast", help="roll a checkpoint out from one or many initial times")
    forecast.add_argument("checkpoint", metavar="CHECKPOINT", help="such as runs/.../checkpoints/best.ckpt")
    forecast.add_argument(
        "--init",
        required=True,
        nargs="+",
        metavar="TIME",
        help="initial times, such as 1991-01 or 2020-01-01T06, and periods FIRST/LAST or FIRST/LAST/24hours",
    )
    forecast.add_argument("--steps", type=int, default=1, metavar="N", help="number of steps (default 1)")
    forecast.add_argument("--output", required=True, metavar="F.nc|F.zarr", help="netCDF file or zarr folder to write")
    forecast.add_argument(
        "--data", nargs="+", metavar="PATH", help="files with the initial fields (default: those of the training)"
    )
    forecast.add_argument("--members", type=int, metavar="N", help="make an ensemble, its initial fields perturbed")
    forecast.add_argument(
        "--perturbation", type=float, default=0.1, metavar="X", help="share of each variable's spread (default 0.1)"
    )
    forecast.add_argument("--seed", type=int, default=0, metavar="N", help="of the perturbations (default 0)")
    forecast.add_argument("--append", action="store_true", help="add initial times to the forecasts that are there")
    forecast.add_argument(
        "--plot", metavar="F.png", help="also draw maps of the last step: forecast, truth, difference"
    )
    _add_mesh(forecast)
    forecast.set_defaults(run=_forecast)
    score = commands.add_parser(
        "score", help="scores of forecasts against the truth, by the definitions of WeatherBench 2"
    )
    score.add_argument("forecast", metavar="FORECAST", help="file, zarr folder, or a glob of them in quotes")
    score.add_argument("truth", nargs="+", metavar="TRUTH", help="files with the fields at the times of the forecast")
    score.add_argument(
        "--climatology",
        metavar="PERIOD|FILE",
        help="period of the truth, such as 1990:2017, or a file by day of the year",
    )
    score.add_argument("--variables", nargs="+", metavar="NAME", help="which to score (default: all of the forecast)")
    score.add_argument("--output", metavar="F.nc", help="netCDF file of all scores, spectra and maps to write")
    score.add_argument("--report", metavar="F.html", help="page with curves, spectra and maps to write")
    score.set_defaults(run=_score)
    inspect = commands.add_parser("inspect", help="what files hold, and what each process reads of their chunks")
    _add_data_options(inspect)
    inspect.set_defaults(run=_inspect)
    rechunk = commands.add_parser("rechunk", help="write a zarr in chunks of one time x one tile")
    _add_data_options(rechunk)
    rechunk.add_argument("output", metavar="OUTPUT.zarr", help="zarr folder to make")
    rechunk.set_defaults(run=_rechunk)
    layout = commands.add_parser(
        "verify-layout", help="train some steps on one process and on a layout, and compare every number"
    )
    layout.add_argument(
        "overrides", nargs="+", metavar="KEY=VALUE", help="as for train.py: mesh=polar2_azimuth2 [model.depth=1 ...]"
    )
    layout.add_argument("--steps", type=int, default=3, metavar="N", help="of the optimiser (default 3)")
    layout.add_argument(
        "--tolerance", type=float, default=1e-6, metavar="X", help="largest relative difference (default 1e-6)"
    )
    layout.set_defaults(run=_verify_layout)

    plan = commands.add_parser(
        "plan", help="memory and exchanges of a training before it starts, and the layout to take"
    )
    plan.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="as for train.py: grid=era5_1deg mesh=polar2_azimuth2 ..."
    )
    plan.add_argument("--processes", type=int, metavar="N", help="compare all layouts of N processes, such as GPUs")
    plan.add_argument("--memory", metavar="SIZE", help="of each process, such as 80GB")
    plan.set_defaults(run=_plan)

    doctor = commands.add_parser(
        "doctor", help="what a report of a fault needs: versions, kernels, devices, a self-test"
    )
    doctor.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="where files lie (default: here)")
    doctor.set_defaults(run=_doctor)
    demo = commands.add_parser("demo", help="make weather-like data of any size and step")
    demo.add_argument("output", metavar="OUTPUT", help="file.nc or folder.zarr to make")
    for name, default, text in (
        ("nlat", 64, "rows; with both poles where odd, cell centres where even"),
        ("nlon", 128, "columns"),
        ("days", 60, "length"),
        ("step-hours", 6, "time between fields"),
        ("seed", 0, "which weather"),
    ):
        demo.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default {default})")
    demo.set_defaults(run=_demo)
    return parser


def _add_data_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("paths", nargs="+", metavar="PATH", help="netCDF or zarr, or a glob of them")
    _add_mesh(command)
    command.add_argument(
        "--variables", nargs="+", metavar="NAME", help="such as t2m z500 (default: all on time, latitude, longitude)"
    )
    command.add_argument("--missing", nargs="+", default=(), metavar="NAME", help="variables that may lack values")
    command.add_argument("--member", type=int, metavar="N", help="ensemble member to read, where there are several")


def _add_mesh(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mesh", metavar="LAYOUT", default="polar=1,azimuth=1", help="process layout, such as polar=2,azimuth=4"
    )


def _mesh(text: str) -> ProcessMesh:
    from sfno_dist.mesh import ProcessMesh

    parts = [part.partition("=")[::2] for part in text.split(",")]
    sizes: dict = dict(parts)
    try:
        if len(sizes) < len(parts):
            raise ValueError
        for axis in sizes.keys() - {"row_balance"}:
            sizes[axis] = int(sizes[axis])
        return ProcessMesh.on_paper(**sizes)
    except (TypeError, ValueError) as error:
        reason = f"; {error}" if "mesh." in str(error) else ""
        raise ValueError(f"--mesh: a layout reads like polar=2,azimuth=4, got {text!r}{reason}") from None


def _inspect(options: argparse.Namespace) -> None:
    from sfno_dist.data import inspect

    choice = {name: getattr(options, name) for name in ("variables", "missing", "member")}
    print(inspect.report(options.paths, _mesh(options.mesh), **choice))


def _rechunk(options: argparse.Namespace) -> None:
    from sfno_dist.data.rechunk import rechunk

    choice = {name: getattr(options, name) for name in ("variables", "missing", "member")}
    rows, columns = rechunk(options.paths, options.output, _mesh(options.mesh), progress=True, **choice)
    print(f"wrote {options.output} in chunks of 1 time x {rows} rows x {columns} columns")


def _forecast(options: argparse.Namespace) -> None:
    from sfno_dist.forecasts import Request
    from sfno_dist.forecasts.command import run

    choice = {name: getattr(options, name) for name in ("steps", "data", "members", "perturbation", "seed", "append")}
    request = Request(options.checkpoint, options.output, options.init, **choice)
    run(request, _mesh(options.mesh), command=["-m", "sfno_dist.cli", *options.words], picture=options.plot)


def _verify_layout(options: argparse.Namespace) -> None:
    from sfno_dist.training.certificate import LayoutError, verify

    certificate = verify(options.overrides, steps=options.steps, tolerance=options.tolerance)
    print(certificate.table(), flush=True)
    if certificate.fault:
        raise LayoutError(certificate.fault)
    print("the layout changes nothing")


def _plan(options: argparse.Namespace) -> None:
    from sfno_dist.plan.command import report

    print(report(options.overrides, processes=options.processes, memory=options.memory))


def _score(options: argparse.Namespace) -> None:
    from sfno_dist.scores.command import score

    choice = {name: getattr(options, name) for name in ("climatology", "variables", "output", "report")}
    print(score(options.forecast, options.truth, **choice))
    for path in filter(None, (options.output, options.report)):
        print(f"wrote {path}")


def _doctor(options: argparse.Namespace) -> None:
    from sfno_dist.doctor import report

    text, sound = report(options.folder)
    print(text)
    sys.exit(0 if sound else 1)


def _demo(options: argparse.Namespace) -> None:
    from sfno_dist.data.demo import write_demo

    choice = {name: getattr(options, name) for name in ("nlat", "nlon", "days", "step_hours", "seed")}
    write_demo(options.output, progress=True, **choice)
    print(f"wrote {options.output}: u, v, z, vo and orography")


if __name__ == "__main__":
    main()
