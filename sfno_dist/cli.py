"""The ``sfno-dist`` command."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

TRACEBACK = "SFNO_DIST_TRACEBACK"


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns an error that the user can mend into one line on standard error and exit status 1.

    With SFNO_DIST_TRACEBACK=1 in the environment the whole traceback is shown instead.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK):
            raise
        # A DataLoader worker sends its error with the traceback before it; the last line says what happened.
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        text = lines[-1].split("Error: ", 1)[-1] if lines[0].startswith("Caught ") else " ".join(lines)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with one_line_errors():
        options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sfno-dist", description="Forecasts from checkpoints that train.py wrote.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    forecast = commands.add_parser("forecast", help="roll a checkpoint out from an initial time")
    forecast.add_argument("checkpoint", metavar="CHECKPOINT", help="such as runs/.../checkpoints/best.ckpt")
    forecast.add_argument(
        "--init", required=True, metavar="TIME", help="initial time, such as 1991-01 or 2020-01-01T06"
    )
    forecast.add_argument("--steps", type=int, default=1, metavar="N", help="number of steps (default 1)")
    forecast.add_argument("--output", required=True, metavar="F.nc", help="netCDF file to write")
    forecast.add_argument(
        "--data", nargs="+", metavar="PATH", help="files with the initial fields (default: those of the training)"
    )
    forecast.add_argument(
        "--plot", metavar="F.png", help="also draw maps of the last step: forecast, truth, difference"
    )
    forecast.set_defaults(run=_forecast)
    return parser


def _forecast(options: argparse.Namespace) -> None:
    from sfno_dist.data.samples import FieldReader
    from sfno_dist.training import checkpoint, plot
    from sfno_dist.training import forecast as forecasts

    try:
        init = np.datetime64(options.init, "ns")
    except ValueError:
        raise ValueError(f"--init: a time reads like 1991-01 or 2020-01-01T06, got {options.init!r}") from None
    loaded = checkpoint.load(options.checkpoint)
    sources = options.data or loaded.data_paths
    for path in filter(None, (options.output, options.plot)):
        forecasts.check_output(sources, path)
    reader = FieldReader.of(loaded.recipe, sources)
    result = forecasts.forecast(loaded, reader, init=init, steps=options.steps)
    forecasts.write(result, options.output)
    print(f"wrote {options.output}: {', '.join(loaded.recipe.outputs)}, {options.steps} x {loaded.recipe.step}")
    if options.plot:
        plot.forecast_maps(result, forecasts.truth(reader, result, loaded), loaded.recipe, options.plot)
        print(f"wrote {options.plot}")


if __name__ == "__main__":
    main()
