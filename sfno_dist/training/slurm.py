"""What a SLURM job must be like for a mesh, told from the environment before anything starts."""

from __future__ import annotations

from collections.abc import Mapping


def wrong_tasks(environment: Mapping[str, str], size: int) -> str | None:
    """What is wrong with the job for a mesh of ``size`` processes and which option mends it; None where nothing is.

    All tasks of a job get the same answer. Processes that torchrun started are its own affair.
    """
    tasks = int(environment.get("SLURM_NTASKS", "1"))
    if "SLURM_JOB_ID" not in environment or "TORCHELASTIC_RUN_ID" in environment or tasks == 1:
        return None
    if "SLURM_STEP_ID" not in environment:
        return (
            f"this SLURM job has {tasks} tasks, but the command was started once, without srun: write srun before it, "
            f"as in 'srun python train.py ...'"
        )
    per_node = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", environment["SLURM_TASKS_PER_NODE"]))
    nodes = len(per_node)
    fit = nodes if size % nodes == 0 else 1
    mend = f"--nodes={fit} --ntasks-per-node={size // fit}"
    if tasks != size:
        there = f"{nodes} nodes x {per_node[0]}" if len(set(per_node)) == 1 else " + ".join(map(str, per_node))
        return f"srun started {tasks} tasks ({there}), but the mesh takes {size}: give {mend}"
    if len(set(per_node)) > 1:
        return f"srun put {' + '.join(map(str, per_node))} tasks on {nodes} nodes; each takes equally many: give {mend}"
    return None


def tasks_per_node(text: str) -> list[int]:
    """The numbers behind SLURM's short form: ``2(x3),1`` is 2, 2, 2, 1."""
    counts = []
    for part in text.split(","):
        count, _, times = part.partition("(x")
        counts += [int(count)] * int(times.rstrip(")") or 1)
    return counts
