"""Linear operators between the processes of one globe, each with its adjoint. Knows no sphere and no attention."""

from sfno_dist.comm.halo import Gather
from sfno_dist.comm.plan import Plan, Reach, halo_plan, latitude_plan
from sfno_dist.comm.reduce import sum_on_cpu, sum_over_globe
from sfno_dist.comm.ring import Ring
from sfno_dist.comm.transpose import transpose
from sfno_dist.comm.whole import whole

__all__ = [
    "Gather",
    "Plan",
    "Reach",
    "Ring",
    "halo_plan",
    "latitude_plan",
    "sum_on_cpu",
    "sum_over_globe",
    "transpose",
    "whole",
]
