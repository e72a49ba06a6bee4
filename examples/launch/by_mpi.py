"""Start a program of torch.distributed under MPI, which numbers the ranks in variables of its own.

    mpirun -n 16 --map-by ppr:8:node -x MASTER_ADDR=node0 -x MASTER_PORT=29400 \\
        python examples/launch/by_mpi.py examples/drop_in_linear.py

MPI itself starts the processes, and carries nothing after that.
"""

from __future__ import annotations

import os
import runpy
import sys

# What torch reads, by Open MPI, by MPICH and Intel MPI, and by Slurm's own `srun python ..`.
NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
}


def main() -> None:
    for name, given in NAMES.items():
        found = next((os.environ[other] for other in given if other in os.environ), None)
        if found is None:
            sys.exit(f"none of {', '.join(given)} is set: start this by mpirun, mpiexec or srun")
        os.environ[name] = found
    os.environ.setdefault("MASTER_ADDR", "localhost")  # all ranks on this host
    os.environ.setdefault("MASTER_PORT", "29400")
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
