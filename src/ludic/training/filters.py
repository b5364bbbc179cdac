"""An import path for sample filters, which live in `ludic.saw.filters`."""

from ludic.saw.filters import Sample as Sample
from ludic.saw.filters import SampleFilter as SampleFilter
from ludic.saw.filters import combine as combine
from ludic.saw.filters import drop_compactions as drop_compactions
from ludic.saw.filters import drop_if as drop_if
from ludic.saw.filters import drop_incomplete_completions as drop_incomplete_completions
from ludic.saw.filters import drop_overlong as drop_overlong
from ludic.saw.filters import drop_parse_errors as drop_parse_errors
from ludic.saw.filters import drop_truncated as drop_truncated
