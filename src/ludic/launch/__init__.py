"""A run's processes, placed and restarted, on this host or by Ray. It knows roles, not runs."""

from ludic.launch.local import LocalEngine
from ludic.launch.roles import Ended, Engine, Placement, Role, Running, Waiting
from ludic.launch.supervisor import Event, Supervisor

__all__ = [
    "Ended",
    "Engine",
    "Event",
    "LocalEngine",
    "Placement",
    "Role",
    "Running",
    "Supervisor",
    "Waiting",
]
