"""Sample filters; they live in `ludic.saw.filters`."""

from ludic.saw.filters import (
    Sample,
    SampleFilter,
    combine,
    drop_if,
    drop_incomplete_completions,
    drop_overlong,
    drop_parse_errors,
    drop_truncated,
)

__all__ = [
    "Sample",
    "SampleFilter",
    "combine",
    "drop_if",
    "drop_incomplete_completions",
    "drop_overlong",
    "drop_parse_errors",
    "drop_truncated",
]
