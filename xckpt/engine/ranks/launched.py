"""How many processes a launcher has started together with this one, by the environment.

Several processes that no group joins would save several states over one another. So where no group
is found, `launched_with` asks whether a launcher has started more than one process. Of SLURM the
number of tasks in the step counts, not that of the job: a batch script is one process, however many
tasks its job may start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COUNTS: Final = {
    "WORLD_SIZE": "torchrun",
    "JAX_NUM_PROCESSES": "JAX",
    "OMPI_COMM_WORLD_SIZE": "Open MPI",
    "PMI_SIZE": "PMI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH",
    "SLURM_STEP_NUM_TASKS": "SLURM",
}
"""Variable with the number of processes -> the launcher that sets it."""


def launched_with(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The variable that announces several processes, and how many; None if there is none.

    Example:
        >>> launched_with({"WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "4"})
        ('OMPI_COMM_WORLD_SIZE', 4)
        >>> launched_with({"SLURM_NTASKS": "4"}) is None
        True
    """
    for variable in COUNTS:
        count = environment.get(variable, "")
        if count.isdecimal() and int(count) > 1:
            return variable, int(count)
    return None


def launched_on_host(environment: Mapping[str, str]) -> int:
    """How many processes of the job torchrun has started on this host; 1 if unknown.

    Example:
        >>> launched_on_host({"LOCAL_WORLD_SIZE": "8"}), launched_on_host({})
        (8, 1)
    """
    count = environment.get("LOCAL_WORLD_SIZE", "")
    return max(1, int(count)) if count.isdecimal() else 1
