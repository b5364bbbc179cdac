from __future__ import annotations

from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import NotTrainableError
from ludic.inference.sampling import SamplingConfig
from ludic.saw.trainable import check_sampling

configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from((0.0, 0.7, 1.0)),
    top_p=st.sampled_from((0.9, 1.0)),
    top_k=st.sampled_from((0, 20)),
    min_p=st.sampled_from((0.0, 0.1)),
    presence_penalty=st.sampled_from((0.0, 0.5)),
    frequency_penalty=st.sampled_from((0.0, -0.5)),
    repetition_penalty=st.sampled_from((1.0, 1.2)),
)


def refuses(check: object, *args: object, **kwargs: object) -> bool:
    try:
        check(*args, **kwargs)  # type: ignore[operator]
    except NotTrainableError:
        return True
    return False


@given(configs, st.booleans())
def test_recorded_settings_are_judged_as_the_settings_themselves(
    config: SamplingConfig, kept: bool
) -> None:
    of_record = refuses(check_sampling, asdict(config), kept_ids_recorded=kept, where="here")
    assert of_record == refuses(config.check_trainable, kept_ids_recorded=kept)


def test_settings_that_were_not_recorded_count_as_the_defaults() -> None:
    check_sampling({}, kept_ids_recorded=False, where="here")
