"""A run's processes, placed and restarted, on this host or by Ray. It knows roles, not runs."""

from ludic.launch.local import LocalEngine as LocalEngine
from ludic.launch.roles import Ended as Ended
from ludic.launch.roles import Engine as Engine
from ludic.launch.roles import Placement as Placement
from ludic.launch.roles import Role as Role
from ludic.launch.roles import Running as Running
from ludic.launch.roles import Waiting as Waiting
from ludic.launch.supervisor import Event as Event
from ludic.launch.supervisor import Supervisor as Supervisor
