"""The training loop: schedules, clipping, accumulation, losses that are not finite, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise, repeat

import pytest
import torch

from muon_fsdp.training import loop, report
from muon_fsdp.training.loop import Pace, make_schedule
from muon_fsdp.training.model import GPT
from muon_fsdp.training.parallel import World
from muon_fsdp.training.results import Evaluation, OptimizerGroup, RunResult, Step, describe_groups
from tests.training_cases import tiny_gpt


def test_cosine_warms_up_peaks_once_and_ends_low() -> None:
    factor = make_schedule("cosine", 100, warmup=0.1, final=0.05)
    factors = [factor(step) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(factors) == pytest.approx(1.0)
    assert all(later <= earlier for earlier, later in pairwise(factors[10:]))
    assert factor(55) == pytest.approx(0.525)  # half way down
    assert factor(100) == pytest.approx(0.05)
    assert all(0 < make_schedule("cosine", 1)(step) <= 1 for step in range(3))


def test_trapezoid_is_flat_and_then_a_line() -> None:
    factor = make_schedule("trapezoid", 100, warmup=0.1, decay=0.4, final=0.05)
    assert [factor(step) for step in (4, 9, 10, 59, 60)] == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0])
    assert factor(80) == pytest.approx(0.525)
    assert factor(100) == pytest.approx(0.05)
    assert make_schedule("trapezoid", 10, warmup=0.9, decay=0.9)(8) == 1.0  # they do not overlap


def test_result_reports_the_first_evaluation_that_reaches_a_loss() -> None:
    result = RunResult("Muon", evaluations=[Evaluation(0, 5.0), Evaluation(10, 3.0), Evaluation(20, 3.5)])
    assert result.first_reaching(3.5) == Evaluation(10, 3.0)
    assert result.first_reaching(2.9) is None
    assert result.best_validation_loss == 3.0
    assert result.final_validation_loss == 3.5


def train_with_sgd(gpt: GPT, pace: Pace, factor: Callable[[int], float] = lambda step: 1.0) -> tuple[RunResult, list]:
    """The result, and the lr and step of every look."""
    optimizer = torch.optim.SGD(gpt.parameters(), lr=2.0)
    tokens = torch.randint(256, (4, 16))
    looks: list[tuple[float, int]] = []
    training = loop.Training(
        model=gpt,
        optimizer=optimizer,
        base_lrs=[2.0],
        clip=lambda norm: torch.nn.utils.clip_grad_norm_(gpt.parameters(), norm),
        schedule=factor,
        train_batches=repeat((tokens, tokens)),
        validation=[(tokens, tokens)],
        pace=pace,
        world=World(torch.device("cpu"), torch.float32),
        on_log=lambda result: looks.append((optimizer.param_groups[0]["lr"], result.num_steps)),
        on_save=lambda step: None,
        stop_wanted=lambda: False,
    )
    return loop.train(training, RunResult("SGD")), looks


def test_training_clips_the_gradient() -> None:
    gpt = tiny_gpt()
    before = torch.nn.utils.parameters_to_vector(gpt.parameters()).detach()
    result, _ = train_with_sgd(gpt, Pace(steps=1, eval_every=1, clip_norm=1e-2))
    moved = torch.nn.utils.parameters_to_vector(gpt.parameters()).detach() - before
    assert moved.norm().item() == pytest.approx(2.0 * 1e-2, rel=1e-2)  # lr times the clipped norm
    assert result.steps[0].gradient_norm > 1e-2


def test_training_clears_the_gradient_after_each_step() -> None:
    gpt = tiny_gpt()
    train_with_sgd(gpt, Pace(steps=1, eval_every=1))
    assert all(parameter.grad is None for parameter in gpt.parameters())


def test_accumulation_gives_the_whole_batch() -> None:
    whole, parts = tiny_gpt(), tiny_gpt()
    results = []
    for gpt, count in ((whole, 1), (parts, 4)):
        torch.manual_seed(1)
        results.append(train_with_sgd(gpt, Pace(steps=3, eval_every=3, num_micro_batches=count))[0])
    assert results[1].train_losses == pytest.approx(results[0].train_losses, rel=1e-5)
    for a, b in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_follows_the_schedule_looks_and_evaluates_at_the_intervals() -> None:
    factor = make_schedule("cosine", 5, warmup=0.4)
    result, looks = train_with_sgd(tiny_gpt(), Pace(steps=5, eval_every=2, log_every=3), factor)
    assert [step for _, step in looks] == [2, 3, 4, 5]
    assert [lr for lr, _ in looks] == pytest.approx([2.0 * factor(step) for step in (1, 2, 3, 4)])
    assert [evaluation.step for evaluation in result.evaluations] == [0, 2, 4, 5]
    assert [step.step for step in result.steps] == [1, 2, 3, 4, 5]
    assert [step.lr for step in result.steps] == pytest.approx([2.0 * factor(step) for step in range(5)])
    assert all(0 < step.optimizer_seconds < step.seconds for step in result.steps)
    assert 0 < result.optimizer_share < 1
    assert result.milliseconds_per_step > 0


def test_training_stops_on_a_loss_that_is_not_finite() -> None:
    gpt = tiny_gpt()
    with torch.no_grad():
        gpt.wte.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="the loss of SGD is nan at step 1; lower the learning rate"):
        train_with_sgd(gpt, Pace(steps=3, eval_every=3, log_every=3))


def test_training_stops_before_a_gradient_that_is_not_finite_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: torch.tensor(math.inf))
    with pytest.raises(FloatingPointError, match="the gradient norm of SGD is inf at step 1"):
        train_with_sgd(tiny_gpt(), Pace(steps=1, eval_every=5))


def test_training_stops_before_weights_that_are_not_finite_are_saved() -> None:
    with pytest.raises(FloatingPointError, match="the validation loss of SGD is nan at step 1"):
        train_with_sgd(tiny_gpt(), Pace(steps=1, eval_every=5), lambda step: math.inf)


def finished_run(name: str, losses: list[float]) -> RunResult:
    """A run with an evaluation every ten steps of 0.1 s, a quarter of it in the optimizer; one step was disturbed."""
    evaluations = [Evaluation(10 * i, loss) for i, loss in enumerate(losses)]
    return RunResult(
        name,
        steps=[
            Step(step, losses[(step + 9) // 10] - 0.5, 0.02, 1.0, 9.0 if step == 1 else 0.1, 0.025)
            for step in range(1, evaluations[-1].step + 1)
        ],
        evaluations=evaluations,
    )


def test_report_compares_with_the_baseline(capsys: pytest.CaptureFixture[str]) -> None:
    fast = finished_run("Fast", [5.0, 3.0, 2.0])
    slow = finished_run("Slow", [5.0, 4.0, 3.0])
    assert report.summarize(fast, baseline=slow) == pytest.approx(
        {
            "final_train_loss": 1.5,
            "final_validation_loss": 2.0,
            "best_validation_loss": 2.0,
            "steps_to_baseline": 10,
            "seconds_to_baseline": 1.0,
            "milliseconds_per_step": 100.0,
            "optimizer_share": 0.25,
        }
    )
    assert report.summarize(slow, baseline=fast)["steps_to_baseline"] is None

    report.print_comparison([fast, slow], baseline=slow)
    printed = capsys.readouterr().out
    assert "reached Slow's final validation loss of 3.000 after 10 of 20 steps, in 1.0 s" in printed
    report.print_comparison([fast, slow], baseline=fast)
    printed = capsys.readouterr().out
    assert "Slow did not reach Fast's final validation loss of 2.000" in printed
    assert "never" in printed


def test_groups_are_described() -> None:
    optimizer = torch.optim.SGD(tiny_gpt().parameters(), lr=2.0)
    num_tensors = len(list(tiny_gpt().parameters()))
    assert describe_groups(optimizer) == [OptimizerGroup("sgd", num_tensors, tiny_gpt().num_parameters(), 2.0, 0.0)]
