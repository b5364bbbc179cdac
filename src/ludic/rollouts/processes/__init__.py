"""Episodes in processes of their own, for runs that Python holds up."""

from ludic.rollouts.processes.pool import WorkerPool as WorkerPool
