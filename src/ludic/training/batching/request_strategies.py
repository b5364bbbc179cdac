"""Request strategies; they live in `ludic.rollouts.strategies`."""

from ludic.rollouts.strategies import GRPORequestStrategy, IdentityStrategy, RequestStrategy

__all__ = ["GRPORequestStrategy", "IdentityStrategy", "RequestStrategy"]
