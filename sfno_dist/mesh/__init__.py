"""Process layouts. Only here are process groups made."""

from sfno_dist.mesh.process_mesh import ProcessMesh

__all__ = ["ProcessMesh"]
