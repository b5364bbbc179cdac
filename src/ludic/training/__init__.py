"""From rollouts to gradients: credit, losses, algorithms, batch sources, the trainer.

Names are imported on first use, so that an actor, which needs only credit assigners and the batch
maths, does not import torch.
"""

from ludic.plumbing.lazy import late_names

__getattr__, __dir__, __all__ = late_names(__name__, __file__)
