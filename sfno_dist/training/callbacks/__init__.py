"""What goes along with a training: scores, maps, throughput, averages, and a stop when it diverges."""

from sfno_dist.training.callbacks.scores import Scores

__all__ = ["Scores"]
