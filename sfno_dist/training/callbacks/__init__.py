"""What goes along with a training: scores, maps, throughput, averages, and a stop when it diverges."""

from sfno_dist.training.callbacks.average import WeightAverage
from sfno_dist.training.callbacks.maps import ForecastMaps
from sfno_dist.training.callbacks.scores import Scores
from sfno_dist.training.callbacks.throughput import Throughput
from sfno_dist.training.callbacks.watchdog import TrainingDivergedError, Watchdog

__all__ = ["ForecastMaps", "Scores", "Throughput", "TrainingDivergedError", "Watchdog", "WeightAverage"]
