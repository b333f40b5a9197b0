"""Forecasts from a checkpoint: many initial times, ensembles, any layout of processes, files that grow as they run."""

from sfno_dist.forecasts.run import Request, forecast

__all__ = ["Request", "forecast"]
