"""From rollouts to gradients: credit, losses, algorithms, batch sources, the trainer.

Names are imported when they are first used, so that an actor, which needs only the credit
assigners and the batch maths, gets by without torch.
"""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
