"""Checkpoints by their short path; they live in `ludic.training.checkpoints`."""

from ludic.training.checkpoints.checkpoint import Checkpointer as Checkpointer
from ludic.training.checkpoints.contents import TrainerState as TrainerState
