"""Settle what a run is given before anything is built: configuration, data, ranks, number of steps and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from muon_fsdp.training.arguments import ConfigError
from muon_fsdp.training.config import TrainConfig
from muon_fsdp.training.data import (
    Batch,
    Corpus,
    OneRankError,
    check_tokens,
    open_corpus,
    training_batches,
    validation_batches,
)
from muon_fsdp.training.loop import Pace
from muon_fsdp.training.model import GPTConfig
from muon_fsdp.training.parallel import World

DEFAULT_STEPS = 100
EVALUATIONS_PER_RUN = 20


@dataclass(frozen=True)
class Inputs:
    """The configuration of a run with the data, the ranks and the number of steps that follow from it."""

    config: TrainConfig
    model_config: GPTConfig
    corpus: Corpus
    world: World

    @property
    def tokens_per_step(self) -> int:
        """Return how many tokens all ranks together read in one step."""
        return self.config.batch_size * self.model_config.sequence_length

    @property
    def pace(self) -> Pace:
        """Return the number of steps, and what happens how often, which the configuration may leave open."""
        config, rows = self.config, rows_per_rank(self.config, self.world.data_size)
        steps = config.steps or DEFAULT_STEPS
        if config.epochs is not None:
            steps = max(1, round(config.epochs * self.corpus.train.numel() / self.tokens_per_step))
        return Pace(
            steps=steps,
            eval_every=config.eval_every or max(5, steps // EVALUATIONS_PER_RUN),
            log_every=config.log_every or (1 if self.world.device.type == "cpu" else 10),
            save_every=config.save_every,
            num_micro_batches=rows // (config.micro_batch_size or rows),
            clip_norm=config.clip_norm,
        )

    def training_rows(self, first: int) -> Iterator[Batch]:
        """Yield this rank's rows of every batch from batch `first` on; a batch is the same on any number of ranks.

        Raises:
            OneRankError: a token is not in the model's vocabulary.
        """
        config, rank = self.config, self.world.data_rank
        rows = config.batch_size // self.world.data_size
        mine = slice(rank * rows, (rank + 1) * rows)
        generator = torch.Generator().manual_seed(config.seed)
        length = self.model_config.sequence_length
        for batch in training_batches(self.corpus.train, config.batch_size, length, generator, first, mine):
            check_tokens(batch, self.model_config.vocab_size, OneRankError)
            yield batch

    def validation_windows(self) -> list[Batch]:
        """Return the validation windows in batches that can be split evenly over the ranks."""
        config, world, tokens = self.config, self.world, self.corpus.validation
        length = self.model_config.sequence_length
        available = (tokens.numel() - 1) // length
        windows = min(config.eval_windows, available) // world.data_size * world.data_size
        if windows == 0:
            raise ConfigError(
                f"the data has only {available} validation window(s) for {world.data_size} ranks: pass a longer text "
                "as --data, or start fewer ranks"
            )
        batches = validation_batches(tokens, config.batch_size // self.pace.num_micro_batches, length, windows)
        for batch in batches:
            check_tokens(batch, self.model_config.vocab_size)
        return batches


def open_inputs(config: TrainConfig, world: World) -> Inputs:
    """Open the data.

    Raises:
        ConfigError: the batch size does not fit the number of ranks, or the model the data.
        DataError: the data cannot be used.
    """
    rows_per_rank(config, world.data_size)
    corpus = open_corpus(config.data, config.model_config(None).sequence_length)
    return Inputs(config, config.model_config(corpus.vocab_size), corpus, world)


def rows_per_rank(config: TrainConfig, data_size: int) -> int:
    """Return how many sequences of a batch each of `data_size` data-parallel ranks reads.

    Raises:
        ConfigError: the batch cannot be divided evenly over ranks and micro-batches.
    """
    rows = config.batch_size // data_size
    micro = config.micro_batch_size or rows
    if rows == 0 or config.batch_size % data_size or rows % micro:
        raise ConfigError(
            f"--batch-size {config.batch_size} must be a multiple of {data_size} data-parallel rank(s)"
            + (f" x --micro-batch-size {micro}" if config.micro_batch_size else "")
        )
    return rows
