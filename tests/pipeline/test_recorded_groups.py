"""Groups that were queued before tokens were read into arrays, and the batch that they became.

`groups_schema_1.json` was written by the code of that time: seven groups of three episodes each, of
one to three players, of up to four turns with one or two calls, some of whose prompts fork; ids of
more than 31 bits, log-probs that are no float32, kept ids, calls without log-probs, tokens of two
policies, NaN in an `info`, and an episode that failed, which that time's statistics overlooked.
"""

from __future__ import annotations

import base64
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from ludic.pipeline.messages import Group, group_message, pack, read_group, unpack
from ludic.rollouts.storage import rollout_from_row, rollout_line
from ludic.saw import batch_from_rollouts, batch_to_dict
from ludic.training import make_grpo
from ludic.types import Rollout, from_json, to_json

RECORDED: Any = json.loads(Path(__file__).with_name("groups_schema_1.json").read_text())
MESSAGES = [base64.b64decode(message) for message in RECORDED["messages"]]


def rollouts() -> list[Rollout]:
    return [rollout for message in MESSAGES for rollout in read_group(message).rollouts]


def plain(rollout: Rollout) -> Rollout:
    """The same with tuples of numbers."""
    return from_json(Rollout, to_json(rollout))


def test_the_rollouts_are_what_they_were() -> None:
    assert blake2b(repr(rollouts()).encode()).hexdigest() == RECORDED["rollouts"]


def test_the_batch_is_the_same_to_the_bit() -> None:
    batch = batch_from_rollouts(rollouts(), make_grpo(group_size=3).credit_assigner)
    assert json.loads(json.dumps(batch_to_dict(batch))) == RECORDED["batch"]
    item = batch.items[0]
    arrays = (item.input_ids, item.attention_mask, item.action_mask)
    assert [str(array.dtype) for array in arrays] == ["int64", "int8", "int8"]


def test_they_are_sent_as_the_same_bytes() -> None:
    for message in MESSAGES:
        group = read_group(message)
        again = Group(group.number, group.rollouts, group.actor)
        assert unpack("group", group_message(again)) == unpack("group", message)


def test_their_lines_in_a_file_are_those_of_rollouts_with_tuples() -> None:
    for rollout in rollouts():
        line = rollout_line(rollout)
        assert line == rollout_line(plain(rollout))
        assert repr(rollout_from_row(json.loads(line))) == repr(rollout)


@pytest.mark.parametrize("field", ["prompt", "completion", "logprobs", "spans"])
def test_an_array_that_lost_a_byte_is_refused_though_the_message_is_whole(field: str) -> None:
    body = unpack("group", MESSAGES[0])
    trace = body["rollouts"][1]["traces"][0]
    for lost in range(1, len(trace[field][1])):
        cut = {**trace, field: [trace[field][0], trace[field][1][:-lost]]}
        body["rollouts"][1]["traces"][0] = cut
        if field in ("logprobs", "completion", "spans") or lost % 4:
            with pytest.raises(ValueError, match="group 0"):
                read_group(pack("group", body))
