"""Plan a search of hyperparameters: which runs come next, as a function of the losses that are known.

The plan of AdamW has at most 12 runs, those of Muon and NorMuon three each:

1. AdamW over three learning rates of the matrices, each half of the next, and AdamW with one lr for all parameters.
   While the best lr is the smallest or the largest, the next one in that direction is tried too.
2. The same over the lr of all other parameters.
3. One change each of beta2, weight decay and warmup, and then all changes that helped together.
4. What is left of the 12 runs: AdamW with one lr for all parameters, at the learning rates chosen above.
5. Muon and NorMuon over three learning rates of the matrices. Everything else is as AdamW's best run had it.

So all that matrices do not see is tuned for AdamW. Every search uses the same seed; the chosen settings are then run
with other seeds.

The plan of rules has three runs for each rule of matrices, over its learning rate, and as many for Muon and NorMuon per
head, and for AdamW and Muon with cautious weight decay. Everything else is as `TUNED` has it, which an earlier search
has found for AdamW. The plan of chains has three runs for each chain of Newton-Schulz steps.

The plan of storage has no search: Muon at the settings that an earlier search has found, with each way to store moments
and to round weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

SEARCH_SEED = 0
ADAMW_RUNS = 12
OTHER_OPTIMIZERS = ("muon", "normuon")
OTHER_WEIGHT_DECAY = 0.01
# One alternative for each option that is not a learning rate, against the values of `Setting`.
ALTERNATIVES: dict[str, float] = {"beta2": 0.99, "weight_decay": 0.5, "warmup": 0.25}
ONE_LR = "one-lr"  # AdamW with one lr for all parameters
# How moments are stored and weights are rounded, and the flags for it.
STORAGE: dict[str, tuple[str, ...]] = {
    "float32": (),
    "bfloat16": ("--state-dtype", "bfloat16"),
    "int8": ("--state-dtype", "int8"),
    "nearest": ("--weights", "bfloat16"),
    "stochastic": ("--weights", "bfloat16", "--rounding", "stochastic"),
    "remainder": ("--weights", "bfloat16", "--rounding", "remainder"),
    "int8-stochastic": ("--state-dtype", "int8", "--weights", "bfloat16", "--rounding", "stochastic"),
}


@dataclass(frozen=True)
class Setting:
    """The hyperparameters of a run. `rest_` is for embedding, head and vectors, which AdamW updates in every run."""

    optimizer: str
    lr: float
    rest_lr: float
    weight_decay: float = 0.1
    rest_weight_decay: float = 0.0
    beta2: float = 0.95
    warmup: float = 0.1
    attention: str = "split"
    orthogonalization: str = "default"
    cautious: bool = False  # whether the weight decay of the matrices is cautious
    storage: str = ""  # a key of STORAGE, in the plan of storage

    @property
    def name(self) -> str:
        """Return the name in tables: the optimizer, and what else differs from the other settings of its plan."""
        if self.storage:
            return self.storage
        parts = {
            "per-head": self.attention == "per_head",
            self.orthogonalization: self.orthogonalization != "default",
            "cautious": self.cautious,
        }
        return "-".join([self.optimizer, *(part for part, is_set in parts.items() if is_set)])

    @property
    def has_one_lr(self) -> bool:
        """Return whether all parameters are treated alike, as in most programs that use AdamW."""
        return self.lr == self.rest_lr and self.weight_decay == self.rest_weight_decay

    @property
    def slug(self) -> str:
        """Return a name for files."""
        decays = f"{self.weight_decay:g}-{self.rest_weight_decay:g}"
        return f"{self.name}-lr{self.lr:g}-{self.rest_lr:g}-wd{decays}-b{self.beta2:g}-w{self.warmup:g}"

    def flags(self) -> list[str]:
        """Return the flags of the training program."""
        betas = f"0.9,{self.beta2:g}"
        is_plugin = self.orthogonalization in PLUGIN_CHAINS
        flags = ["--plugin", "experiments.frontier_plugin"] if is_plugin else []
        flags += [
            "--optimizer",
            f"{self.optimizer}_frontier" if is_plugin else self.optimizer,
            "--lr",
            f"{self.lr:g}",
            "--rest-lr",
            f"{self.rest_lr:g}",
        ]
        flags += ["--weight-decay", f"{self.weight_decay:g}", "--rest-weight-decay", f"{self.rest_weight_decay:g}"]
        flags += ["--rest-betas", betas, "--warmup-fraction", f"{self.warmup:g}"]
        flags += ["--attention", self.attention] if self.attention != "split" else []
        chain = f"orthogonalization={self.orthogonalization}"
        flags += ["--set", chain] if self.orthogonalization != "default" else []
        flags += STORAGE[self.storage] if self.storage else []
        flags += ["--set", "cautious_weight_decay=true"] if self.cautious else []
        return flags + (["--betas", betas] if self.optimizer == "adamw" else [])


@dataclass(frozen=True)
class Start:
    """The learning rates at which the searches of a model start, and the number of seeds afterwards."""

    adamw_lr: float
    rest_lr: float
    muon_lr: float
    num_seeds: int


STARTS = {
    "demo": Start(adamw_lr=4e-3, rest_lr=1.6e-2, muon_lr=0.04, num_seeds=5),
    "small": Start(adamw_lr=1e-3, rest_lr=4e-3, muon_lr=0.04, num_seeds=5),
    "gpt2": Start(adamw_lr=1e-3, rest_lr=2e-3, muon_lr=0.04, num_seeds=3),
    "medium": Start(adamw_lr=1e-3, rest_lr=2e-3, muon_lr=0.04, num_seeds=3),
}
# What AdamW's best run had at 10.8M parameters (docs/experiments/search_small.csv).
TUNED = {"small": Setting("adamw", 0.002, 0.008, weight_decay=0.5, warmup=0.25)}
PER_HEAD = ("muon", "normuon")  # these rules are compared with heads as matrices of their own too
CAUTIOUS = ("adamw", "muon")  # and these with cautious weight decay
# The middle of the learning rates of the other rules, which do not have the scale of Muon's updates, and their decay.
OTHER_LRS = {"hyperball": 0.02, "spectral_sphere": 0.02}
# The chains that are compared. Those of the plugin are points of docs/experiments/frontier.csv that the package lacks.
CHAINS = {
    "muon": ("keller", "polar_express", "accurate", "fast", "17-17", "33-17", "65-65"),
    "normuon": ("keller", "polar_express", "accurate", "fast", "17-17", "65-65"),
}
PLUGIN_CHAINS = ("17-17", "33-17", "65-65")
# At these learning rates seeds differ by 0.0025 only; at those of `TUNED`, differences between chains would drown.
CHAIN_START = Setting("muon", lr=0.02, rest_lr=0.003, weight_decay=OTHER_WEIGHT_DECAY)
Losses = Mapping[Setting, float]  # of the runs with `SEARCH_SEED`; infinite for a run that diverged


class Pending(Exception):  # noqa: N818 - not an error: the plan waits
    """The plan cannot go on before these settings have been run."""

    def __init__(self, settings: Sequence[Setting]) -> None:
        super().__init__(f"{len(settings)} runs are missing")
        self.settings = list(settings)


class Trials:
    """The runs of one search, in the order in which the plan asks for them, with a limit on their number."""

    def __init__(self, losses: Losses, limit: int) -> None:
        self._losses, self._limit = losses, limit
        self.tried: list[Setting] = []

    @property
    def num_left(self) -> int:
        """Return how many more settings may be tried."""
        return self._limit - len(self.tried)

    def measure(self, settings: Sequence[Setting]) -> None:
        """Add settings to the trials; those beyond the limit are left out.

        Raises:
            Pending: some of them have not been run yet.
        """
        new = [setting for setting in dict.fromkeys(settings) if setting not in self.tried]
        self.tried += new[: self.num_left]
        missing = [setting for setting in self.tried if setting not in self._losses]
        if missing:
            raise Pending(missing)

    def best(self, among: Sequence[Setting] | None = None) -> Setting:
        """Return the setting with the lowest loss, the first of equal ones."""
        return min(self.tried if among is None else among, key=lambda setting: self._losses[setting])

    def loss(self, setting: Setting) -> float:
        """Return the loss of a setting that has been run."""
        return self._losses[setting]


def line(trials: Trials, centre: Setting, name: str, reserve: int, beside: Sequence[Setting] = ()) -> Setting:
    """Try half and twice the value of one hyperparameter, and go on from the best while it is the last on its side.

    Args:
        trials: where the runs are counted.
        centre: the setting to start from.
        name: the field of `Setting` to change.
        reserve: how many runs to leave for later.
        beside: other settings to run at the same time.

    Returns:
        The best setting on the line.
    """
    middle = getattr(centre, name)
    on_line = [replace(centre, **{name: value}) for value in (middle / 2, middle, 2 * middle)]
    trials.measure([*on_line, *beside])
    while (best := trials.best(on_line)) in (on_line[0], on_line[-1]) and trials.num_left > reserve:
        upwards = best == on_line[-1]
        further = replace(best, **{name: getattr(best, name) * (2 if upwards else 0.5)})
        on_line = [*on_line, further] if upwards else [further, *on_line]
        trials.measure([further])
    return best


def with_one_lr(setting: Setting, lr: float) -> Setting:
    """Return the setting with one lr for all parameters, and weight decay on all matrices."""
    return replace(setting, lr=lr, rest_lr=lr, rest_weight_decay=setting.weight_decay)


def search_adamw(trials: Trials, start: Start) -> dict[str, Setting]:
    """Search the hyperparameters of AdamW.

    Returns:
        The best setting, and under `ONE_LR` the best with one lr for all parameters.

    Raises:
        Pending: runs are missing.
    """
    centre = Setting("adamw", start.adamw_lr, start.rest_lr)
    num_later = 2 + len(ALTERNATIVES) + 1
    centre = line(trials, centre, "lr", num_later, [with_one_lr(centre, start.adamw_lr)])
    centre = line(trials, centre, "rest_lr", len(ALTERNATIVES) + 1)
    changed = {name: replace(centre, **{name: value}) for name, value in ALTERNATIVES.items()}
    trials.measure(list(changed.values()))
    helped = {name: ALTERNATIVES[name] for name, each in changed.items() if trials.loss(each) < trials.loss(centre)}
    trials.measure([replace(centre, **helped)])
    best = trials.best()
    trials.measure([with_one_lr(best, lr) for lr in (best.lr, best.rest_lr)])
    return {"adamw": trials.best(), ONE_LR: trials.best([each for each in trials.tried if each.has_one_lr])}


def search_lr(trials: Trials, optimizer: str, lr: float, others: Setting) -> Setting:
    """Search the lr of the matrices of another optimizer over three values, with all else as in `others`.

    Returns:
        The best setting.

    Raises:
        Pending: runs are missing.
    """
    centre = replace(others, optimizer=optimizer, lr=lr, weight_decay=OTHER_WEIGHT_DECAY)
    return line(trials, centre, "lr", reserve=0)


@dataclass(frozen=True)
class Outlook:
    """The state of a search: the settings chosen so far, all that were tried, and those to run next."""

    chosen: dict[str, Setting]
    tried: dict[str, list[Setting]]
    pending: list[Setting]


def look_ahead(losses: Losses, start: Start) -> Outlook:
    """Follow the plan as far as the losses are known. Equal losses give an equal plan, so a search can be resumed."""
    adamw = Trials(losses, ADAMW_RUNS)
    try:
        chosen = search_adamw(adamw, start)
    except Pending as pending:
        return Outlook({}, {"adamw": adamw.tried}, pending.settings)
    tried, missing = {"adamw": adamw.tried}, []
    for optimizer in OTHER_OPTIMIZERS:
        trials = Trials(losses, limit=3)
        try:
            chosen[optimizer] = search_lr(trials, optimizer, start.muon_lr, chosen["adamw"])
        except Pending as pending:
            missing += pending.settings
        tried[optimizer] = trials.tried
    return Outlook(chosen, tried, missing)


def rules_to_compare(model: str) -> dict[str, Setting]:
    """Return the settings from which the plan of rules starts, by name."""
    start = STARTS[model]
    tuned = TUNED.get(model, Setting("adamw", start.adamw_lr, start.rest_lr))
    muons = [replace(tuned, optimizer=each, lr=start.muon_lr, weight_decay=OTHER_WEIGHT_DECAY) for each in PER_HEAD]
    others = [replace(tuned, optimizer=each, lr=lr, weight_decay=0.0) for each, lr in OTHER_LRS.items()]
    heads = [replace(each, attention="per_head") for each in muons]
    cautious = [replace(each, cautious=True) for each in (tuned, *muons) if each.optimizer in CAUTIOUS]
    settings = [tuned, *muons, *heads, *cautious, *others]
    return {setting.name: setting for setting in settings}


def chains_to_compare(model: str) -> dict[str, Setting]:
    """Return the settings from which the plan of chains starts, by name; all models have the same."""
    settings = [
        replace(CHAIN_START, optimizer=optimizer, orthogonalization=each)
        for optimizer, chains in CHAINS.items()
        for each in chains
    ]
    return {setting.name: setting for setting in settings}


def look_at_lines(losses: Losses, settings: Mapping[str, Setting]) -> Outlook:
    """Follow a plan that tries three learning rates of each setting, as far as the losses are known."""
    chosen, tried, missing = {}, {}, []
    for name, setting in settings.items():
        trials = Trials(losses, limit=3)
        try:
            chosen[name] = line(trials, setting, "lr", reserve=0)
        except Pending as pending:
            missing += pending.settings
        tried[name] = trials.tried
    return Outlook(chosen, tried, missing)


def look_at_storage(model: str) -> Outlook:
    """Return Muon with every way to store moments and to round weights, all of them chosen."""
    muon = rules_to_compare(model)["muon"]
    return Outlook({name: replace(muon, storage=name) for name in STORAGE}, {}, [])


@dataclass(frozen=True)
class Plan:
    """What a search looks for.

    Args:
        look: returns the state of the search.
        names: the names of the settings that it chooses.
        num_seeds: how many other seeds the chosen settings are run with, unless the user says.
    """

    look: Callable[[Losses], Outlook]
    names: tuple[str, ...]
    num_seeds: int


COMPARISONS = {"rules": (rules_to_compare, 3), "chains": (chains_to_compare, 5)}  # where each starts, and its seeds
PLANS = ("optimizers", "storage", *COMPARISONS)


def plan_named(name: str, model: str) -> Plan:
    """Return the plan of this name for a model."""
    if name == "optimizers":
        start = STARTS[model]
        return Plan(partial(look_ahead, start=start), ("adamw", ONE_LR, *OTHER_OPTIMIZERS), start.num_seeds)
    if name == "storage":
        return Plan(lambda losses: look_at_storage(model), tuple(STORAGE), 3)
    to_compare, num_seeds = COMPARISONS[name]
    settings = to_compare(model)
    return Plan(partial(look_at_lines, settings=settings), tuple(settings), num_seeds)


def place_of(value: float, tried: Sequence[float]) -> str:
    """Describe where a chosen value lies among those that were tried."""
    ordered = sorted(set(tried))
    among = ", ".join(f"{each:g}" for each in ordered)
    if len(ordered) == 1:
        return f"{value:g} is the only value that was tried"
    if value in (ordered[0], ordered[-1]):
        return f"{value:g} is the {'smallest' if value == ordered[0] else 'largest'} value that was tried ({among})"
    return f"{value:g} lies inside the range that was tried ({among})"
