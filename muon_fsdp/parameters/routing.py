"""Decide which rule each parameter gets and how it is read as matrices, and give the reason."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from muon_fsdp.declarations.settings import Attention
from muon_fsdp.declarations.views import VIEW_NAMES, vectors_in
from muon_fsdp.parameters.experts import find_experts
from muon_fsdp.parameters.facts import Facts, Fused, Layers, Options, vocabulary_tables
from muon_fsdp.parameters.fused import find_fused
from muon_fsdp.parameters.names import clean_name, first_match, plain_name
from muon_fsdp.rules import RULES, rule_named

_LABEL_ATTRIBUTE = "_muon_fsdp_labels"  # on a module: {parameter name: view name}
_EMBEDDING_NAME = re.compile(r"(^|_)(wte|wpe|emb|embed|embeds|embedding|embeddings)(_|\d|$)")
_HEAD_NAME = re.compile(
    r"(lm_|mlm_|output_|to_|final_)?(head|logits|unembed|unembedding)|output(_layer|_proj|_projection)?|embed_out|classifier|decoder"
)
_LAST_HEAD_NAME = re.compile(r"fc|score")  # heads if no other Linear follows
# Parameters that a model adds to its inputs or looks up, by their own names: `reg_token`, `latents`, `rel_pos_h`.
_TOKEN_NAME = re.compile(r"(^|_)(tokens?|latents?|registers?|queries|prompts?|slots)$")
_TABLE_NAME = re.compile(
    r"(^|_)(table|codebooks?)$|(^|_)(pos(emb|embed|enc)?|positions?|positional)(_(?!.*(proj|weight)$)|\d|$)"
)
# Parameters of PEFT: factors or rows of an embedding, whose shapes differ from its shape.
_ADAPTER_NAME = re.compile(r"(^|\.)(lora_embedding_[AB]|trainable_tokens_(delta|original))\.[^.]+$")
# Low-rank factors of LoRA, by PEFT ("lora_A.default.weight") or hand-written ("lora_A.weight", "lora_A").
_FACTOR_NAME = re.compile(r"(^|\.)lora_([AB])(\.[^.]+)?(\.weight)?$")
_POSITION_NAME = re.compile(r"(^|[._])(wpe|pos|positions?|positional|type|token_type|segment)([._]|\d|$)")
_BIAS_NAME = re.compile(r"(^|_)bias(es)?$")
_DECAY_NAME = re.compile(r"(^|_)(a_logs?|log_a_real|time_decay)$")  # names in Mamba, VMamba, S4D and RWKV
_NORM_CLASS = re.compile(r"Norm(\dd)?$")  # LayerNorm, BatchNorm2d; not LayerNormLinear, whose weight is a matrix

Doubts: TypeAlias = dict[str, list[str]]  # questions that only the user can decide, with the names of the parameters


@dataclass(frozen=True)
class Route:
    """The rule of one parameter, decided when it was added, and the reason."""

    name: str
    shape: tuple[int, ...]  # whole
    rule: str
    reason: str
    # Not decided by the user, the type of the module or a name; `strict` refuses guesses.
    guessed: bool = False
    # How the parameter is read as matrices, by its model or its name. The options of its group win where they are set.
    view: str = "auto"
    transposed: bool = False
    num_heads: int | None = None
    split_sizes: tuple[int, ...] | None = None
    pattern: str | None = None  # the override that matches its name
    overridden: tuple[str, ...] = ()  # the names of the options that this override sets for it
    lr_origin: str = ""  # which option its learning rate came from, if its rule may follow the matrices
    defaults: Options = ()  # of this parameter, unless its group or an override sets them
    given_name: str | None = None  # as the user passed it, including what wrappers insert
    unnamed_position: int | None = None  # its number among all parameters, if it has no name
    decided: bool = False  # by the user, with an override or the rule of a group
    fused: Fused | None = None  # what it seems to consist of, unless the user has decided how it is read


@dataclass(frozen=True)
class GroupRule:
    """The rule that a user's group asks for."""

    rule: str
    is_explicit: bool  # it holds for all matrices, whatever the model or their names suggest
    is_divided: bool  # an optimizer has made the group, and all its parameters have this rule
    view: str  # how its parameters are read as matrices


def label(module: nn.Module, view: str, parameter: str = "weight") -> None:
    """Set how a parameter of a module is read as matrices, for example `label(block.attn, "attn", "qkvo")`.

    The label is stored on the module, so it survives `fully_shard`, which replaces parameters. Call this before or
    after wrapping. The optimizer sees it if it is built from the model.

    Args:
        module: the module that holds the parameter itself.
        view: "auto", "matrix", "stacked", "flatten" or "attn".
        parameter: the parameter's name in that module.
    """
    if view not in VIEW_NAMES:
        raise ValueError(f"Unknown label {view!r}; valid names are {', '.join(VIEW_NAMES)}")
    module = getattr(module, "_orig_mod", module)  # under torch.compile
    if parameter not in dict(module.named_parameters(recurse=False)):
        raise ValueError(f"{type(module).__name__} has no parameter {parameter!r} of its own to label")
    module.__dict__.setdefault(_LABEL_ATTRIBUTE, {})[parameter] = view


class Router:
    """Decides the rule of parameters by overrides first, then by group, model, name and shape."""

    def __init__(
        self, overrides: Mapping[str, str | Mapping[str, Any]] | None, other_rule: str, attention: Attention
    ) -> None:
        if overrides is not None and not isinstance(overrides, Mapping):
            raise TypeError(f"overrides must be a dict of name patterns, got {type(overrides).__name__}")
        self.overrides = {pattern: _override_options(pattern, value) for pattern, value in (overrides or {}).items()}
        self.other_rule = other_rule
        self._attention: Attention = attention
        self.warnings: list[str] = []
        self._facts: dict[int, Facts] = {}
        self._doubts: Doubts = {}

    @contextmanager
    def reading(self, model: nn.Module | None, named: Iterable[tuple[str, Tensor]] = ()) -> Iterator[None]:
        """Route inside the block by a model, or else by the names of all parameters.

        Facts are keyed by the identity of parameters, so they are dropped afterwards.
        """
        if model is not None:
            self._facts, self._doubts = _facts_of_model(model, self.other_rule, self._attention)
        else:
            self._facts = {id(p): _facts_of_name(clean_name(name), p, named=True) for name, p in named}
            _add_structure(self._facts, {}, self._attention)
        try:
            yield
        finally:
            self._facts, self._doubts = {}, {}

    @property
    def names(self) -> set[str]:
        """Return the names of all parameters of the model, or all that were given."""
        return {facts.name for facts in self._facts.values()}

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the parameter's name in the model; None without a model."""
        facts = self._facts.get(id(parameter))
        return facts.name if facts and facts.owners else None

    def route(self, parameter: Tensor, name: str, group: GroupRule, *, named: bool) -> Route:
        """Return the route of one parameter of a group."""
        facts = self._facts.get(id(parameter)) or _facts_of_name(name, parameter, named=named)
        view = "attn" if facts.view == "auto" and getattr(parameter, "label", None) == "attn" else facts.view
        pattern = first_match(self.overrides, name)
        options = self.overrides[pattern] if pattern is not None else {}
        requested = options.get("view", group.view)
        vectors = vectors_in(tuple(parameter.shape), view if requested == "auto" else requested)
        rule, guessed, decided = group.rule, False, False
        # "blocks.*" means the matrices of the blocks and leaves their vectors alone; a full name is always obeyed.
        if "rule" in options and (pattern == name or not vectors or not RULES[options["rule"]].needs_matrices):
            rule, reason, decided = options["rule"], f"override {pattern!r}", True
        elif vectors and not (group.is_divided and RULES[rule].needs_matrices):
            decided = group.is_explicit and not RULES[rule].needs_matrices
            rule = rule if decided else self.other_rule
            reason = "scalar" if parameter.ndim == 0 else "vector" if vectors == 1 else "stack of vectors"
        elif group.is_explicit:
            reason, decided = f"group with rule {rule!r}", True
        elif facts.other_reason is not None:
            rule, reason, guessed = self.other_rule, facts.other_reason, facts.guessed
        else:
            reason = facts.matrix_reason or ("matrix" if parameter.ndim == 2 else f"{parameter.ndim}D weight")
        shape = tuple(parameter.shape)
        is_cut = view != "attn" and (facts.num_heads is not None or facts.split_sizes is not None)
        is_settled = (decided and not is_cut) or view == "attn" or not RULES[rule].needs_matrices
        fused = None if is_settled else facts.fused
        return Route(
            name,
            shape,
            rule,
            reason,
            guessed,
            view,
            facts.transposed,
            facts.num_heads if is_cut else None,
            facts.split_sizes if is_cut else None,
            pattern,
            decided=decided,
            fused=fused,
        )

    def doubts(self, routes: Sequence[Route]) -> list[str]:
        """Return the questions about these parameters that neither the model nor the user answers."""
        by_name = {route.name: route for route in routes}
        found = []
        for text, names in self._doubts.items():
            present = [by_name[name] for name in names if name in by_name]
            decided = [route for route in present if route.decided]
            # If the user has declared one of several to be the head, the others are not.
            if len(decided) < len(present) and all(RULES[route.rule].needs_matrices for route in decided):
                found.append(text)
        return found

    def doubt_about_bare(self, routes: Sequence[Route]) -> str | None:
        """Return a warning about matrices without names that look like a language model's embedding or head."""
        bare = {route.unnamed_position: route for route in routes if route.unnamed_position is not None}
        as_given = [bare[position] for position in sorted(bare)]
        tables = [as_given[index] for index in vocabulary_tables([route.shape for route in as_given])]
        taken = [route for route in tables if RULES[route.rule].needs_matrices and not route.decided]
        if not taken:
            return None
        names = ", ".join(f"{route.name!r} of shape {route.shape}" for route in taken)
        return (
            f"{names}: orthogonalized, but with the shape of a language model's embedding or output head. Parameters "
            "without names can't be told apart: pass the model or model.named_parameters(), or put these into a group "
            f"with rule={self.other_rule!r}. If they should be orthogonalized, a group with rule={taken[0].rule!r} "
            "silences this warning."
        )


def _override_options(pattern: str, value: str | Mapping[str, Any]) -> dict[str, Any]:
    where = f"overrides[{pattern!r}]"
    if not isinstance(pattern, str):
        raise TypeError(f"{where}: a pattern of names must be a string")
    if not isinstance(value, (str, Mapping)):
        raise TypeError(f"{where} must be a rule name or a dict of group options, got {value!r}")
    options = {"rule": value} if isinstance(value, str) else dict(value)
    if "rule" in options:
        try:
            rule_named(options["rule"])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    return options


def _facts_of_name(name: str, parameter: Tensor, *, named: bool) -> Facts:
    facts = Facts(name, tuple(parameter.shape), parameter.requires_grad)
    if not named:
        return facts
    name = plain_name(name)
    facts.plain_names.add(name)
    *path, leaf = name.lower().split(".")
    if leaf.isdigit() and path:  # an element of a ParameterList
        leaf = path.pop()
    owner = path[-1] if path else ""
    purposes = {  # the first that holds counts
        "bias": _BIAS_NAME.search(leaf),
        "adapter of an embedding": _ADAPTER_NAME.search(name),
        "embedding": _EMBEDDING_NAME.search(owner if leaf == "weight" else leaf),
        "output head": _is_head_name(name),
        "decay rates": _DECAY_NAME.search(leaf),
        "learned tokens": _TOKEN_NAME.search(leaf),
        "table": _TABLE_NAME.search(leaf),
    }
    purpose = next((purpose for purpose, is_so in purposes.items() if is_so), None)
    if purpose is not None:
        facts.other_reason = f"{purpose}, by name"
    elif "conv" in owner and parameter.ndim >= 3:
        facts.view, facts.matrix_reason = "flatten", "convolution, by name"
    facts.matrix_reason = facts.matrix_reason or _factor_reason(facts.name)
    return facts


def _factor_reason(name: str) -> str | None:
    """Return the reason of a low-rank factor of LoRA; None for another parameter."""
    factor = _FACTOR_NAME.search(name)
    return f"LoRA factor {factor[2]}" if factor else None


def _is_head_name(name: str, pattern: re.Pattern[str] = _HEAD_NAME) -> bool:
    """Return whether the parameter's module is named like an output head and is not part of a repeated block."""
    *path, _ = name.lower().split(".")
    return bool(path) and pattern.fullmatch(path[-1]) is not None and not any(part.isdigit() for part in path)


def _add_structure(facts: Mapping[int, Facts], modules: Mapping[str, nn.Module], attention: Attention) -> None:
    """Add what a weight's place in the model tells: routers, transposed experts and fused weights."""
    layers = Layers(facts.values(), modules)
    find_experts(layers)
    find_fused(layers, attention)


def _facts_of_model(model: nn.Module, other_rule: str, attention: Attention) -> tuple[dict[int, Facts], Doubts]:
    facts: dict[int, Facts] = {}
    for name, parameter, module in _owned_parameters(model):
        entry = facts.setdefault(id(parameter), Facts(name, tuple(parameter.shape), parameter.requires_grad))
        plain = plain_name(name)
        entry.owners.append(module)
        entry.plain_names.add(plain)
        leaf = plain.rpartition(".")[2]
        if _is_convolution(module) and parameter.ndim >= 3:
            entry.view, entry.matrix_reason = "flatten", "convolution"
        if leaf in getattr(module, _LABEL_ATTRIBUTE, {}):
            entry.view, entry.labelled = getattr(module, _LABEL_ATTRIBUTE)[leaf], True
        entry.matrix_reason = entry.matrix_reason or _factor_reason(name)
        class_names = [cls.__name__ for cls in type(module).__mro__]  # fully_shard inserts a class at the front
        entry.transposed |= "Conv1D" in class_names and parameter.ndim == 2
        reason = None
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            reason = "embedding"
        elif any(map(_NORM_CLASS.search, class_names)) and not isinstance(module, nn.Linear):
            reason = "weight of a normalization"
        elif leaf != "weight" or not (isinstance(module, nn.Linear) or _is_convolution(module)):
            reason = _facts_of_name(name, parameter, named=True).other_reason
        entry.other_reason = entry.other_reason or reason
    doubts = _find_heads(facts, other_rule)
    modules = {clean_name(f"{name}.")[:-1]: module for name, module in model.named_modules()}
    _add_structure(facts, modules, attention)
    return facts, doubts


def _owned_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Yield (name, parameter, its module) for every parameter; a tied parameter once per module."""
    modules = dict(model.named_modules())
    for prefix, module in modules.items():
        owner = module
        if isinstance(module, ParametrizationList):  # "linear.parametrizations.weight": the Linear owns it
            owner = modules[prefix.rpartition("parametrizations.")[0].removesuffix(".")]
        for leaf, parameter in module.named_parameters(recurse=False):
            yield clean_name(f"{prefix}.{leaf}" if prefix else leaf), parameter, owner


def _find_heads(facts: dict[int, Facts], other_rule: str) -> Doubts:
    """Mark output heads: tied to an embedding, named like a head, or else the only Linear of an embedding's shape."""
    doubts: Doubts = {}
    embeddings = [entry for entry in facts.values() if (entry.other_reason or "").startswith("embedding")]
    linears = [entry for entry in facts.values() if any(isinstance(module, nn.Linear) for module in entry.owners)]
    matrices = [e for e in linears if e not in embeddings and len(e.shape) == 2 and not vectors_in(e.shape, "matrix")]
    tied = [entry for entry in linears if entry in embeddings]
    for entry in tied:
        entry.other_reason = "embedding tied to the output head"
    token_shapes = {entry.shape for entry in embeddings if not _POSITION_NAME.search(entry.name.lower())}
    tied_names = {name for entry in tied for name in entry.plain_names}
    copies = [entry for entry in matrices if entry.plain_names & tied_names]  # PEFT trains a copy of a frozen head
    weights = [entry for entry in facts.values() if len(entry.shape) > 1]
    last = next((entry.plain_names for entry in reversed(weights[1:]) if entry in linears), set())
    named_heads = [
        entry
        for entry in matrices
        if any(map(_is_head_name, entry.plain_names))
        or (entry.plain_names == last and any(_is_head_name(name, _LAST_HEAD_NAME) for name in last))
    ]
    heads = [*copies, *(entry for entry in named_heads if entry.shape in token_shapes)]
    for entry in heads:
        entry.other_reason = "output head"
    for entry in named_heads:
        if entry not in heads:
            text = (
                f"{entry.name} is named like an output head, but no embedding has its shape {tuple(entry.shape)}: "
                f"it is orthogonalized. If it is a head, pass overrides={{{entry.name!r}: {other_rule!r}}}."
            )
            doubts[text] = [entry.name]
    if not tied and not heads:
        for shape in sorted(token_shapes):
            doubts |= _guess_head([entry for entry in matrices if entry.shape == shape], other_rule)
    return doubts


def _guess_head(candidates: list[Facts], other_rule: str) -> Doubts:
    """Mark the only trainable candidate, or return a doubt if there are several; a weight and its copies count once."""
    candidates = [entry for entry in candidates if entry.trainable] or candidates
    if len({frozenset(entry.plain_names) for entry in candidates}) == 1:
        for entry in candidates:
            entry.other_reason = "output head: the only Linear of the embedding's shape"
            entry.guessed = True
    elif candidates:
        names = ", ".join(entry.name for entry in candidates[:4]) + (", ..." if len(candidates) > 4 else "")
        text = (
            f"{len(candidates)} Linear layers have the shape of an embedding and none is named like an output head "
            f"({names}): all are orthogonalized. If one is the head, pass overrides={{name: {other_rule!r}}}."
        )
        return {text: [entry.name for entry in candidates]}
    return {}


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(
        module,
        (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    )
