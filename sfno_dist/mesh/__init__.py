"""Process layouts and the tiles that they cut. Only here are process groups made."""

from sfno_dist.mesh.decomposition import Decomposition
from sfno_dist.mesh.process_mesh import ProcessLostError, ProcessMesh

__all__ = ["Decomposition", "ProcessLostError", "ProcessMesh"]
