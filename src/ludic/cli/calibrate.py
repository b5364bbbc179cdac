"""`ludic calibrate`: how many tokens of a run fit into one forward and backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from ludic.runs.assemble import algorithm_of, build_model
from ludic.runs.locate import locate
from ludic.runs.show import say
from ludic.training import TrainerConfig
from ludic.training.update.calibrate import calibrate as find_budget


def calibrate(run: str, overrides: Sequence[str]) -> None:
    """Tries real updates of the run's model and prints the setting to use."""
    config, weights = locate(run, overrides)
    model, _ = build_model(config, weights)
    training = config.training
    found = find_budget(
        model,
        algorithm_of(config).loss,
        TrainerConfig(
            max_seq_len=training.max_seq_len,
            micro_token_budget=training.micro_token_budget,
            gradient_checkpointing=training.gradient_checkpointing,
        ),
    )
    gib = 2**30
    say(
        f"training.micro_token_budget={found.micro_token_budget}: the peak is "
        f"{found.peak_bytes / gib:.1f} of {found.total_bytes / gib:.1f} GiB"
    )
