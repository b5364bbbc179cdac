"""Request strategies; they live in `ludic.rollouts.strategies`."""

from ludic.rollouts.strategies import GRPORequestStrategy as GRPORequestStrategy
from ludic.rollouts.strategies import IdentityStrategy as IdentityStrategy
from ludic.rollouts.strategies import RequestStrategy as RequestStrategy
