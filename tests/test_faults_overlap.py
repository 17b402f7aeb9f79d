"""Stages that start in backward (`overlap="backward"`)."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

from muon_fsdp import MuonOptimizer
from tests import overlap_cases as cases
from tests import overlap_ddp_cases as ddp_cases
from tests.fault_cases import LIMIT, backward, net
from tests.pool import RankError, RankPool
from tests.promises import promise

ACCUMULATED = ["by hand", "without reductions", "by the optimizer"]
DISCARDING = ["one more in step 3", "one less in step 3", "dropped in step 3", "clip", "clip by optimizer"]
DISCARDING_SOME = ["double one", "double one through data", "average one by hand", "double one on rank 1"]
DISCARDING_SOME += ["replace one", "remove one", "remove one on rank 1"]
LAYOUTS = [
    (2, {"layout": "ddp", "rule": "normuon"}),
    (3, {"layout": "fsdp"}),
    (4, {"layout": "hsdp", "rule": "normuon"}),
]


@promise(
    'With `overlap="backward"`, gradients are accumulated over several backwards',
    'Stages start in the last one; the results are those of `overlap="step"`',
)
def test_accumulation_starts_stages_in_the_last_backward(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, ACCUMULATED, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert (used, discarded) == (4 * stages, 0), name  # the first two of six steps find out what comes


@promise(
    'With `overlap="backward"`, there is another backward, or none, or gradients are clipped before `step()`',
    'What was started is discarded, and counted in `metrics()`; the results are those of `overlap="step"`',
)
@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_what_no_longer_counts_is_discarded(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, DISCARDING, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            rounds = 3 if name == "dropped in step 3" else 4
            assert used + discarded == rounds * stages, name
            assert discarded >= stages, name


@promise(
    'With `overlap="backward"`, `step()` raises an error before backward, and is called again after it',
    'What was started without these gradients is discarded; the results are those of `overlap="step"`',
)
@pytest.mark.parametrize(("world_size", "options"), LAYOUTS)
def test_gradients_that_came_too_late_were_not_read(ranks: RankPool, world_size, options):
    for found in ranks.run(world_size, cases.same_in_all, ["failed before backward"], options, timeout=LIMIT):
        ((used, discarded, stages),) = found.values()
        assert (used, discarded) == (3 * stages, stages)


@promise(
    'With `overlap="backward"`, `unshard_params()` is entered before backward or after it',
    'Nothing is discarded; the results are those of `overlap="step"`',
)
def test_unsharded_weights_leave_stages_alone(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, ["unsharded before backward", "nothing"], timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert (used, discarded) == (4 * stages, 0), name


@promise(
    'With `overlap="backward"`, state changes between backward and `step()`, even where PyTorch does not count it: by '
    "`torch._foreach_*` on DTensors or through `.data` (on a GPU, such a change is not noticed)",
    'What was started is discarded; the results are those of `overlap="step"`',
)
@pytest.mark.parametrize(("world_size", "options"), LAYOUTS)
def test_changed_state_is_noticed_by_its_values(ranks: RankPool, world_size, options):
    names = ["state by foreach", "state through data"]
    for found in ranks.run(world_size, cases.same_in_all, names, options, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert (used, discarded) == (3 * stages, stages), name


@promise(
    'With `overlap="backward"`, the state of parameters is cleared before `step()`, on one rank or on all',
    'What was started is discarded on all ranks, and state starts anew; the results are those of `overlap="step"`',
)
@pytest.mark.parametrize(("world_size", "options"), LAYOUTS)
def test_cleared_state_starts_anew(ranks: RankPool, world_size, options):
    names = ["clear", "drop all state", "cleared before backward"]
    if options["layout"] == "fsdp":  # elsewhere ranks hold the same state
        names += ["cleared before backward on rank 1"]
    for found in ranks.run(world_size, cases.same_in_all, names, options, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert (used, discarded) == (3 * stages, stages), name


@promise(
    'With `overlap="backward"`, the gradient of a matrix is changed or removed after backward, on one rank or on all',
    'Its stage is discarded on all ranks, other stages are used; the results are those of `overlap="step"`',
)
@pytest.mark.filterwarnings("ignore:overlap='backward' gains nothing")
def test_only_stages_whose_gradients_changed_are_discarded(ranks: RankPool):
    for found in ranks.run(2, cases.same_in_all, DISCARDING_SOME, timeout=LIMIT):
        for name, (used, discarded, stages) in found.items():
            assert discarded == 1, name
            skips = "remove" in name  # nothing of this stage starts in the step after
            assert used == 4 * stages - 1 - skips, name


@promise(
    'With `overlap="backward"`, a rank gets no gradient for a parameter that others have one for',
    'It takes part with zeros at the beginning of `step()`, no rank hangs; the results are those of `overlap="step"`',
)
def test_ranks_may_lack_different_gradients(ranks: RankPool):
    results = ranks.run(2, cases.missing_gradients, timeout=LIMIT)
    assert results[0] == results[1]
    used, discarded = results[0]
    assert used > 3  # how many stages start in time depends on the load of the machine
    assert discarded > 1


@promise(
    'With `overlap="backward"`, DDP has a communication hook of its own, or nobody says when plain tensors are reduced',
    "Nothing starts in backward, and `plan_report()` says why",
)
def test_the_report_says_why_nothing_starts_under_ddp(ranks: RankPool):
    for found in ranks.run(3, ddp_cases.reports, timeout=LIMIT):
        assert "DistributedDataParallel has another communication hook" in found["hook"]
        assert found["built-in"] == found["hook"]
        assert "torch.compile reduces the gradients" in found["compiled"]
        assert "gradient_as_bucket_view=True, DistributedDataParallel rounds in two ways on 3 ranks" in found["views"]
        assert "no DistributedDataParallel wraps a plain tensor" in found["none"]


@promise(
    'With `overlap="backward"`, torch.distributed is initialized anew between backward and `step()`',
    "What was started is dropped, and later stages start in backward again",
)
def test_a_new_process_group_ends_what_was_started(ranks: RankPool, tmp_path):
    ((used, discarded),) = ranks.run(1, cases.initialized_anew, str(tmp_path), timeout=LIMIT)
    assert used > 6  # those of step 2, and some after step 3
    assert discarded == 0


@promise(
    'Two optimizers with `overlap="backward"` on the same ranks',
    "Only stages of the first start in backward, and `plan_report()` of the second says so: their transfers could mix",
)
@pytest.mark.parametrize("layout", ["fsdp", "ddp"])
def test_one_optimizer_at_a_time_starts_stages_in_backward(ranks: RankPool, layout):
    for first, second, report in ranks.run(2, cases.two_optimizers, layout, timeout=LIMIT):
        assert first[0] > 0
        assert first[1] == 0
        assert second == (0, 0)
        assert "another optimizer starts its own in backward" in report


@promise(
    'With `overlap="backward"`, an optimizer is replaced between backward and `step()`, as after a loss spike',
    "Its ranks finish what they started; stages of the new one start in backward again, with right results",
)
@pytest.mark.parametrize(("world_size", "layout"), [(3, "fsdp"), (2, "ddp"), (4, "hsdp")])
def test_an_optimizer_may_be_dropped_between_backward_and_step(ranks: RankPool, world_size, layout):
    for has_ended, (used, _) in ranks.run(world_size, cases.dropped_before_step, layout, timeout=LIMIT):
        assert has_ended
        assert used > 5


@promise(
    'With `overlap="backward"`, ranks did not finish what a dropped optimizer started before the time limit',
    "Nothing starts in backward any more, and `plan_report()` says so: the process groups for it can't be used",
)
def test_process_groups_whose_exchange_failed_are_not_used_again(ranks: RankPool):
    assert ranks.run(1, cases.broken_claim, timeout=LIMIT) == [[False, True]]


@promise(
    'With `overlap="backward"`, `metrics()` was called, and stages that are discarded still run when `step()` ends',
    "They take no samples; `step()` raised `dictionary changed size during iteration`",
)
def test_discarded_stages_take_no_samples(ranks: RankPool):
    for differences in ranks.run(2, cases.samples_after_step, timeout=LIMIT):
        assert set(differences.values()) == {0.0}  # those of the last step that had gradients


ENDS_AFTER_BACKWARD = """
import os, sys
from itertools import product
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from muon_fsdp import FSDPMuonOptimizer
torch.set_num_threads(1)
folder, codes, children = sys.argv[1], [7, 7, 0], []
for job, rank in product(range(3), range(2)):  # by forks, because each process would import torch for seconds
    children.append(os.fork())
    if not children[-1]:
        break
else:
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
    sys.exit()
dist.init_process_group("gloo", init_method=f"file://{folder}/{job}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = FSDPMuonOptimizer(model, lr=0.01, overlap="backward", max_stage_bytes=2**15)
for step in range(4):
    model(torch.randn(4, 64)).square().mean().backward()
    if step < 3:
        optimizer.step()
        optimizer.zero_grad()
if codes[job]:
    sys.exit(codes[job])
"""


@promise(
    'With `overlap="backward"`, a program ends between backward and `step()`',
    "It ends with its own status, not with SIGABRT, after waiting at most 10 seconds for other ranks",
)
def test_a_program_may_end_between_backward_and_step(tmp_path):
    command = [sys.executable, "-c", ENDS_AFTER_BACKWARD, str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT, check=True)
    assert done.stdout == "[7, 7, 7, 7, 0, 0]\n"


@promise(
    '`overlap="backward"` with `nonfinite="skip"` or `"raise"`, `cuda_graph=True` or a GradScaler',
    "An error says what to leave out",
)
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nonfinite": "skip"}, "can't be combined with nonfinite='skip'"),
        ({"nonfinite": "raise"}, "can't be combined with nonfinite='raise'"),
        ({"cuda_graph": True}, "can't be combined with cuda_graph=True"),
    ],
)
def test_settings_that_need_all_gradients_first_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        MuonOptimizer(net(), overlap="backward", **options)
    with pytest.raises(ValueError, match="overlap"):
        MuonOptimizer(net(), overlap="forward")


def test_a_grad_scaler_is_refused():
    model = net()
    optimizer = MuonOptimizer(model, overlap="backward")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="can't be combined with GradScaler"):
        scaler.step(optimizer)


@promise(
    'With `overlap="backward"`, all gradients are clipped before every step',
    "One warning says that nothing is gained, and names the clipping that works",
)
def test_clipping_warns_once():
    model, optimizer = cases.train_alone("backward")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5, 8):
            backward(model, step)
            optimizer._planned.overlap._round.wait()  # otherwise a stage may read the clipped gradients
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
    (text,) = [str(warning.message) for warning in caught]
    assert "gradients of matrices have changed after backward" in text
    assert "clip_grad_norm_(max_norm, rules=('adamw',))" in text
    assert cases.counts(optimizer) == (3, 3)


@promise(
    "A rank dies while matrices are exchanged in backward, or before it agrees on the step",
    "The others raise an error that names the ranks and the matrices that they waited for",
)
@pytest.mark.parametrize(
    ("when", "text"),
    [
        ("before it agrees", r"Rank 0 waited for ranks \[1\] to agree about a step, and one of them can't be reached"),
        ("in an exchange", r"Rank 0 waited for ranks \[1\] to exchange the matrices of stage \d muon .*started in"),
    ],
)
def test_a_rank_that_dies_ends_the_others(when, text):
    ranks = RankPool()
    try:
        with pytest.raises(RankError, match=text) as error:
            ranks.run(2, cases.dies, when, timeout=60)
        assert "rank 1 died" in str(error.value)
    finally:
        ranks.close()
