from ludic.agents.programs.agent import ProgramAgent as ProgramAgent
from ludic.agents.programs.agent import ProgramFunction as ProgramFunction
from ludic.agents.programs.agent import ProgramResult as ProgramResult
from ludic.agents.programs.server import ChatServer as ChatServer
from ludic.agents.programs.session import Session as Session
