"""The presets: what each is made of, names, group sizes, state."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludic.errors import (
    CheckpointError,
    ConfigError,
    CreditError,
    DuplicateNameError,
    UnknownNameError,
)
from ludic.training import (
    Aggregation,
    BetaTracker,
    CISPOLoss,
    CompositeLoss,
    Constant,
    EntropyBonus,
    GMPOLoss,
    GroupMean,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    MonteCarloReturn,
    ReinforceBaselineLoss,
    ReinforceLoss,
    RLAlgorithm,
    SAPOLoss,
    SequenceClippedSurrogateLoss,
    SequenceMean,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    TokenMean,
    TrackedAdvantage,
    list_algorithms,
    make_algorithm,
    make_cispo,
    make_dr_grpo,
    make_gmpo,
    make_grpo,
    make_gspo,
    make_opd,
    make_reinforce,
    make_reinforce_baseline,
    make_sapo,
    make_scalerl,
    make_sft,
    make_spo,
    register_algorithm,
)
from tests.oracles.rollouts import make_rollout

PRESETS = [
    "reinforce",
    "reinforce_baseline",
    "grpo",
    "dr_grpo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "scalerl",
    "spo",
    "opd",
    "sft",
]


@pytest.mark.parametrize("name", [n for n in PRESETS if make_algorithm(n).group_size is not None])
def test_every_group_algorithm_can_compare_what_is_left_of_a_group(name: str) -> None:
    whole = make_algorithm(name, group_size=3)
    partial = whole.with_partial_groups()
    left = [make_rollout(i, [r], group="g") for i, r in (("a", 0.0), ("b", 1.0))]
    with pytest.raises(CreditError, match="not group_size=3"):
        whole.credit_assigner.compute(left)
    credit = partial.credit_assigner.compute(left)
    assert credit["a", 0] == -credit["b", 0] < 0
    assert (partial.loss, partial.preprocess) == (whole.loss, whole.preprocess)


def test_an_algorithm_that_needs_whole_groups_says_so() -> None:
    assert make_reinforce().with_partial_groups() == make_reinforce()

    class Whole:
        group_size = 2

        def compute(self, rollouts: Any) -> Any:
            return {}

    with pytest.raises(ConfigError, match="'own' compares only whole groups"):
        replace(make_grpo(), name="own", credit_assigner=Whole()).with_partial_groups()


def test_presets_are_made_of_what_the_design_says() -> None:
    assert make_reinforce(0.9).credit_assigner == MonteCarloReturn(0.9)
    assert make_reinforce().loss == ReinforceLoss(aggregation=TokenMean())
    assert make_reinforce_baseline().loss == ReinforceBaselineLoss()
    assert make_grpo().credit_assigner == GroupNormalizedReturn(8, normalize_adv=True)
    assert make_grpo().loss == TokenClippedSurrogateLoss(
        clip=(0.8, 1.2), aggregation=SequenceMean()
    )
    assert make_dr_grpo(4).credit_assigner == GroupNormalizedReturn(4, normalize_adv=False)
    assert make_dr_grpo().loss == TokenClippedSurrogateLoss(aggregation=Constant(1024))
    assert make_gspo().loss == SequenceClippedSurrogateLoss(clip=(1 - 3e-4, 1 + 4e-4))
    assert make_cispo().loss == CISPOLoss(cap=5.0, aggregation=TokenMean())
    assert make_sapo().loss == SAPOLoss(tau_pos=1.0, tau_neg=1.05, aggregation=SequenceMean())
    assert make_gmpo().loss == GMPOLoss(clip=0.4, aggregation=SequenceMean())
    assert make_scalerl(4).credit_assigner == HybridNormalizedReturn(4)
    assert make_scalerl().loss == CISPOLoss(aggregation=GroupMean())
    assert make_scalerl().preprocess is not None
    assert make_scalerl(filter_zvp=False).preprocess is None
    assert isinstance(make_spo().credit_assigner, TrackedAdvantage)
    assert make_opd().group_size is None
    assert make_sft().group_size is None


def test_every_preset_is_listed_with_one_line_and_made_by_name() -> None:
    listed = list_algorithms()
    assert set(PRESETS) <= set(listed)
    for name in PRESETS:
        assert listed[name]
        assert "\n" not in listed[name]
        assert make_algorithm(name).name == name


@pytest.mark.parametrize("name", PRESETS)
def test_an_algorithm_is_one_file_of_about_a_page_that_states_its_formula(
    name: str, repo_root: Path
) -> None:
    path = repo_root / "src/ludic/training/algorithms" / f"{name}.py"
    text = path.read_text()
    # Distillation has two levels and a reward beside its teacher: its formula takes more room.
    written = [line for line in text.splitlines() if line.strip()]
    assert len(written) <= (65 if name == "opd" else 50)
    assert "bjective" in text.split('"""')[1] or "A = " in text.split('"""')[1]


def test_the_documentation_builds_an_algorithm_in_under_thirty_lines(repo_root: Path) -> None:
    page = (repo_root / "docs/add_an_algorithm.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert "def make_rloo" in code
    assert len([line for line in code.splitlines() if line.strip()]) < 30


def test_what_is_exported_lazily_is_what_type_checkers_see() -> None:
    import ludic.training

    stub = Path(str(ludic.training.__file__)).with_suffix(".pyi").read_text()
    lines = [n for n in ast.parse(stub).body if isinstance(n, ast.ImportFrom)]
    seen = {alias.asname for line in lines for alias in line.names}
    listed = vars(ludic.training)["__all__"]
    assert seen == set(listed)
    assert all(getattr(ludic.training, name) is not None for name in listed)


def test_listing_algorithms_imports_no_torch() -> None:
    code = (
        "import sys, ludic.training as t; t.list_algorithms(); t.RLAlgorithm; "
        "t.GroupNormalizedReturn; t.BetaTracker; t.subtract_mean; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", [n for n in PRESETS if n not in ("opd", "sft")])
def test_an_entropy_bonus_is_one_argument_and_is_aggregated_as_the_loss_is(name: str) -> None:
    plain: Any = make_algorithm(name).loss
    whole = make_algorithm(name, entropy_coeff=0.01).loss
    assert isinstance(whole, CompositeLoss)
    assert whole.terms == ((1.0, plain), (0.01, EntropyBonus(aggregation=plain.aggregation)))
    assert make_algorithm(name, entropy_coeff=0.0).loss == plain
    with pytest.raises(ConfigError, match=r"entropy_coeff=-0\.1: must be >= 0"):
        make_algorithm(name, entropy_coeff=-0.1)


def test_an_entropy_bonus_stands_beside_a_kl_term() -> None:
    whole = make_grpo(kl_coeff=0.1, entropy_coeff=0.01).loss
    assert isinstance(whole, CompositeLoss)
    assert [(c, type(loss)) for c, loss in whole.terms] == [
        (1.0, TokenClippedSurrogateLoss),
        (0.1, TokenKLLoss),
        (0.01, EntropyBonus),
    ]


def test_unknown_names_and_wrong_arguments_are_explained() -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean .*'grpo'"):
        make_algorithm("gpro")
    with pytest.raises(ConfigError, match=r"'grpo' cannot be made.*groups"):
        make_algorithm("grpo", groups=8)
    with pytest.raises(ConfigError, match="at least 2"):
        make_algorithm("grpo", group_size=1)


TAKES_AN_AGGREGATION = [
    "reinforce",
    "reinforce_baseline",
    "grpo",
    "cispo",
    "scalerl",
    "spo",
    "opd",
    "sft",
]


@pytest.mark.parametrize("name", TAKES_AN_AGGREGATION)
@pytest.mark.parametrize(
    ("spec", "meant"),
    [
        ("token_mean", TokenMean()),
        ("sequence_mean", SequenceMean()),
        ("group_mean", GroupMean()),
        ({"kind": "sequence_mean", "unit": "rollout"}, SequenceMean("rollout")),
        ({"kind": "constant", "length": 64}, Constant(64)),
        (Constant(1), Constant(1)),  # the sum, for each rollout
    ],
)
def test_an_aggregation_can_be_named(name: str, spec: Any, meant: Aggregation) -> None:
    loss: Any = make_algorithm(name, aggregation=spec).loss
    assert loss.aggregation == meant


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("token_meen", "unknown aggregation 'token_meen'; did you mean 'token_mean'"),
        ("constant", "'constant' cannot be made: .*length"),
        ({"kind": "constant", "length": 0}, "must be > 0"),
        ({"kind": "sequence_mean", "unit": "batch"}, 'must be "turn" or "rollout"'),
        ({"length": 3}, "needs a 'kind', one of: .*group_mean"),
        (3, "aggregation 3 needs a 'kind', one of: .*token_mean"),
    ],
)
def test_a_wrong_aggregation_is_explained(spec: Any, words: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=words):
        make_algorithm("grpo", aggregation=spec)


def test_an_algorithm_whose_aggregation_is_fixed_says_that_it_takes_none() -> None:
    for name in set(PRESETS) - set(TAKES_AN_AGGREGATION):
        with pytest.raises(ConfigError, match=f"'{name}' cannot be made.*'aggregation'"):
            make_algorithm(name, aggregation="token_mean")


def test_an_algorithm_of_ones_own_is_registered_once() -> None:
    register_algorithm("test_only_mine", make_grpo, description="mine")
    assert list_algorithms()["test_only_mine"] == "mine"
    assert make_algorithm("test_only_mine", group_size=4).group_size == 4
    with pytest.raises(DuplicateNameError):
        register_algorithm("test_only_mine", make_grpo)


def test_rollouts_per_update_must_be_a_multiple_of_the_group_size() -> None:
    make_grpo(8).check_rollouts_per_update(64)
    make_reinforce().check_rollouts_per_update(7)
    with pytest.raises(ConfigError, match=r"rollouts_per_update=20 .* group_size=8.* 16"):
        make_grpo(8).check_rollouts_per_update(20)
    with pytest.raises(ConfigError, match="rollouts_per_update=0"):
        make_reinforce().check_rollouts_per_update(0)


@pytest.mark.parametrize("make", [make_grpo, make_dr_grpo, make_gspo, make_cispo, make_sapo])
def test_a_kl_coefficient_adds_k3_with_the_losss_own_aggregation(make: object) -> None:
    assert callable(make)
    loss = make(kl_coeff=0.05).loss
    assert isinstance(loss, CompositeLoss)
    (one, policy_loss), (coefficient, kl) = loss.terms
    assert (one, coefficient) == (1.0, 0.05)
    assert kl.estimator == "k3"  # type: ignore[attr-defined]
    assert kl.aggregation == policy_loss.aggregation  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="kl_coeff"):
        make(kl_coeff=-1.0)


def test_a_losss_own_preprocess_is_taken_over_once() -> None:
    algorithm = make_reinforce_baseline()
    assert algorithm.preprocess is not None
    again = replace(algorithm, credit_assigner=MonteCarloReturn(0.5))
    assert again.preprocess == algorithm.preprocess


def test_distillation_with_rewards_needs_to_know_what_they_are_worth() -> None:
    with pytest.raises(ConfigError, match="credit_assigner"):
        make_opd(reward_coeff=0.5)
    algorithm = make_opd(reward_coeff=0.5, credit_assigner=GroupNormalizedReturn(4))
    assert algorithm.group_size == 4
    assert make_opd(level="turn").loss.scope == "turn"
    grouped = make_opd(reward_coeff=0.5, group_size=4, aggregation=SequenceMean())
    assert grouped.credit_assigner == GroupNormalizedReturn(4, normalize_adv=True)
    assert grouped.loss.aggregation == SequenceMean()  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="not both"):
        make_opd(group_size=4, credit_assigner=GroupNormalizedReturn(4))


def test_the_state_of_an_algorithm_is_that_of_its_credit() -> None:
    tracker = BetaTracker()
    algorithm = make_spo(tracker=tracker)
    algorithm.credit_assigner.compute([make_rollout("a", [1.0], task="t")])
    state = algorithm.state_dict()
    other = make_spo()
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert make_grpo().state_dict()["credit_assigner"] is None
    make_grpo().load_state_dict(make_grpo().state_dict())
    with pytest.raises(CheckpointError, match=r"'spo'.*'grpo'"):
        make_grpo().load_state_dict(state)


def test_any_credit_and_loss_make_an_algorithm() -> None:
    class Mine:
        needs_logits = False
        scope = "token"

        def compute(self, policy: object, batch: object) -> object:
            raise AssertionError

    algorithm = RLAlgorithm("mine", MonteCarloReturn(), Mine())  # type: ignore[arg-type]
    assert algorithm.preprocess is None
    assert algorithm.group_size is None
