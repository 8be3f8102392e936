"""What a model has learnt, as pictures for TensorBoard."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor

from lightning_hmm import plotting
from lightning_hmm.columns import are_named
from lightning_hmm.distributions import Poisson, Product
from lightning_hmm.observing import reporting
from lightning_hmm.sequences import Sequences

_MAX_SEQUENCES = 256
_MAX_POSTERIOR = 2_000_000  # entries, steps times states: 16 MB
_MAX_PAIRED = 2000  # symbols: their pairs are 32 MB
_MAX_STATIONARY = 1000  # states: beyond them the cubic cost shows
_MAX_TRACKS = 32  # sequences that particles are run along for a figure
_WITHIN_90 = 1.645  # standard deviations of a Gaussian that hold 90 %


class Figures(Callback):
    """Draws the model after epochs 1, 2, 4, 8 and so on, or after every `every_n_epochs`, and after the last, for each TensorBoard logger.

    - ``figures/transition_matrix`` and ``figures/emissions``: the parameters of the chosen restart.
    - ``figures/state_usage``: the expected share of time in each state, given some of the validation data (of the training
      data if there are none), and how long a visit lasts. The stationary distribution would be that share in an endless
      sequence; it is drawn, and said to be, only where a model has no `posterior` for its batches.
    - ``figures/convergence``: the likelihood of all epochs. The curve is in the checkpoint, and goes on after a resume.
    - ``figures/composition``: where probabilities are made of vectors, those and these before training and now. At the end the
      vectors go to TensorBoard's projector, with the names of states and symbols.
    - ``figures/cooccurrences``: where a model fits the frequencies of symbol pairs, those of data and model.
    - ``figures/effective_size``, ``figures/latents`` and ``figures/predictions``: where particles stand for a continuous state, how many of them count, the
      smoothed states of some data by cluster, and one sequence beside what was expected of it.

    A figure that a model has no numbers for is left out. The step of a figure is Lightning's `global_step`, which batch EM advances once per epoch and
    online EM once per batch. A figure that cannot be drawn or written is reported by a warning, once for each kind of
    figure, and training continues.

    Args:
        every_n_epochs: about half a second is spent on each set of figures, which may be far more than an epoch takes. If
            not given, the epochs double: EM changes most in its first steps.
        max_labels: how many symbols, states or features are labelled on an axis.
        num_clusters: of a continuous state.
        lead: how many steps later a continuous state is read; see `NeuralHMM.latents`.
    """

    def __init__(
        self, every_n_epochs: int | None = None, max_labels: int = 40, num_clusters: int = 5, lead: int = 0
    ) -> None:
        for name, value in {
            "every_n_epochs": every_n_epochs,
            "max_labels": max_labels,
            "num_clusters": num_clusters,
        }.items():
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be at least 1, but is {value} instead.")
        if lead < 0:
            raise ValueError(f"`lead` must be at least 0, but is {lead} instead.")
        self.every_n_epochs, self.max_labels, self.num_clusters, self.lead = (
            every_n_epochs,
            max_labels,
            num_clusters,
            lead,
        )
        # By epoch, counted from 1: training log-likelihoods of all restarts, validation log-likelihood of the chosen one.
        self.train: dict[int, list[float]] = {}
        self.val: dict[int, float] = {}
        self._excerpts: dict[str, Sequences] = {}
        self._drawn_epoch = 0
        self._reported: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._excerpts, self._drawn_epoch, self._reported = {}, 0, set()
            if trainer.current_epoch == 0:
                # Another run with the same callback; a checkpoint to go on from is loaded after this.
                self.train, self.val = {}, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep("training", trainer, pl_module, batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._keep("validation", trainer, pl_module, batch)

    def _keep(self, part: str, trainer: Trainer, model: Any, batch: Any) -> None:
        """The first batch, which then serves all figures of the run: they differ by the model alone."""
        with reporting(f"Keeping some {part} data for figures", self._reported):
            if part not in self._excerpts and isinstance(batch, Sequences) and _writers(trainer):
                self._excerpts[part] = _excerpt(batch, max(1, _MAX_POSTERIOR // getattr(model, "num_states", 1)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get("val/log_likelihood")
        if trainer.state.fn == "fit" and not trainer.sanity_checking and value is not None:
            self.val[trainer.current_epoch + 1] = float(value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        epoch = trainer.current_epoch + 1
        # After a resume from between validation and the end of an epoch, that epoch ends without a batch.
        if pl_module.train_likelihood.update_called:
            # Callbacks run before the module's own hook, which publishes this epoch's value; the metric has it already. It
            # is summed over the ranks, so all of them must ask.
            self.train[epoch] = pl_module.train_likelihood.compute().reshape(-1).tolist()
        if epoch & (epoch - 1) == 0 if self.every_n_epochs is None else epoch == 1 or epoch % self.every_n_epochs == 0:
            self._draw(trainer, pl_module, epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > self._drawn_epoch:
            self._draw(trainer, pl_module, trainer.current_epoch)
        with reporting("Writing vectors for the projector", self._reported):
            for name, vectors in getattr(pl_module, "embeddings", {}).items():
                names = _symbol_names(pl_module) if name == "V" else None
                for writer in _writers(trainer):
                    writer.add_embedding(
                        vectors,
                        names or [str(row) for row in range(len(vectors))],
                        tag=name,
                        global_step=trainer.global_step,
                    )

    def _draw(self, trainer: Trainer, model: Any, epoch: int) -> None:
        self._drawn_epoch = epoch
        with warnings.catch_warnings(), reporting("Drawing figures", self._reported):
            # Names in scripts that the font lacks are drawn as boxes, which the reader sees without a warning.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            writers = _writers(trainer)
            for name, draw in self._figures(model) if writers else ():
                with reporting(f"The figure {name}", self._reported):
                    figure = draw()
                    for writer in writers if figure is not None else ():
                        writer.add_figure(f"figures/{name}", figure, trainer.global_step)

    def _figures(self, model: Any) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        """The name of each figure and the function that draws it, or returns ``None`` where the model has no numbers for it."""
        transition = _matrix(model, "transition_probs")
        share_of_time = functools.cache(lambda: self._share(model, transition))
        if transition is not None:
            yield "transition_matrix", lambda: plotting.transition_matrix(transition, self.max_labels)
        yield from self._emission_figures(model, share_of_time)
        yield "state_usage", lambda: _state_usage(*share_of_time(), transition)
        if hasattr(model, "embeddings"):
            yield (
                "composition",
                lambda: plotting.composition(
                    _composition(model.at_start()), _composition(model), _symbol_names(model), self.max_labels
                ),
            )
        target = getattr(model, "target_cooccurrences", None)
        if target is not None and len(target) <= _MAX_PAIRED:
            yield (
                "cooccurrences",
                lambda: plotting.cooccurrences(target, model.cooccurrences, _symbol_names(model), self.max_labels),
            )
        if hasattr(model, "one_step_predictions"):
            yield from self._latent_figures(model)
        epochs = sorted(self.train.keys() | self.val.keys())
        if epochs:
            unknown = [np.nan] * model.restarts
            train, val = (
                [self.train.get(epoch, unknown) for epoch in epochs],
                [self.val.get(epoch, np.nan) for epoch in epochs],
            )
            yield "convergence", lambda: plotting.convergence(epochs, train, val, int(model.chosen))

    def _latent_figures(self, model: Any) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        excerpt = self._excerpts.get("validation", self._excerpts.get("training"))
        if excerpt is None or not excerpt[:_MAX_TRACKS].num_steps:
            return
        data = excerpt[:_MAX_TRACKS]
        predicted = functools.cache(lambda: model.one_step_predictions(data))
        yield "effective_size", lambda: plotting.effective_size(predicted().effective_size.values, data.lengths)
        yield "latents", lambda: self._latents(model, data)
        yield "predictions", lambda: _predictions(data, predicted())

    def _latents(self, model: Any, data: Sequences) -> Figure:
        clusters = model.cluster_latents(data, min(self.num_clusters, data.num_steps), lead=self.lead)
        return plotting.latents(model.latents(data, lead=self.lead).values, clusters.values, data.lengths)

    def _emission_figures(
        self, model: Any, share: Callable[[], tuple[np.ndarray | None, str]]
    ) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        """One figure for each part of a product of emissions, and one for all other emissions."""
        emission = getattr(model, "emission", None)
        if not isinstance(emission, Product):
            yield "emissions", lambda: self._emissions(model, emission, share, None)
            return
        for number, (part, place) in enumerate(zip(emission.parts, emission.places, strict=True)):
            yield f"emissions_{number}", functools.partial(self._emissions, model, part, share, place)

    def _emissions(
        self, model: Any, emission: Any, share: Callable[[], tuple[np.ndarray | None, str]], place: list[int] | None
    ) -> Figure | None:
        """The probabilities of symbols, or means and covariances; ``None`` where there are neither.

        Args:
            model: the model.
            emission: its emission, or a part of it.
            share: returns the share of time in each state, and what it is of.
            place: of a part of a product, the numbers of its columns.
        """
        columns: Any = getattr(model, "columns", None)
        if place is not None:
            columns = [model.columns[number] for number in place]
        probs = _matrix(model, "emission_probs") if place is None else _matrix(emission, "probs")
        if probs is not None:
            return plotting.emission_matrix(
                probs, _symbol_names(model) if place is None else columns[0].category_names, self.max_labels
            )
        if hasattr(emission, "moments"):
            means, variances = (moment.numpy(force=True) for moment in emission.moments())
            variances = getattr(emission, "covariance", variances)
        else:
            means, variances = _matrix(model, "means"), _matrix(model, "variances")
        if means is None or variances is None:
            return None
        excerpt = self._excerpts.get("validation", self._excerpts.get("training"))
        points = None if excerpt is None else excerpt.values if place is None else excerpt.values[:, place]
        names = [column.name for column in columns] if columns is not None and are_named(columns) else None
        if isinstance(emission, Poisson) and means.shape[1] == 1:
            return plotting.count_emissions(
                means[:, 0], share()[0], None if points is None else points[:, 0], None if names is None else names[0]
            )
        return plotting.gaussian_emissions(
            means,
            variances,
            share()[0],
            center=getattr(emission, "center", None),
            variance=getattr(emission, "data_variance", None),
            points=points,
            max_labels=self.max_labels,
            names=names,
        )

    def _share(self, model: Any, transition: np.ndarray | None) -> tuple[np.ndarray | None, str]:
        """The expected share of time in each state, and what it is of."""
        for part in ("validation", "training"):
            if part in self._excerpts and hasattr(model, "posterior"):
                visits = _expected_visits(model, self._excerpts[part])
                if visits is not None and visits.sum() > 0:
                    return visits / visits.sum(), f"{self._excerpts[part].num_steps:,} steps of {part} data"
        if transition is not None and len(transition) <= _MAX_STATIONARY:
            return plotting.stationary_distribution(transition), "stationary distribution"
        return None, ""

    def state_dict(self) -> dict[str, Any]:
        return {"train": dict(self.train), "val": dict(self.val)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.train, self.val = dict(state_dict["train"]), dict(state_dict["val"])


def _writers(trainer: Trainer) -> list[Any]:
    """Where figures go: nowhere on other ranks than the first."""
    return (
        [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if trainer.is_global_zero
        else []
    )


def _state_usage(share: np.ndarray | None, source: str, transition: np.ndarray | None) -> Figure | None:
    if share is None and transition is None:
        return None
    return plotting.state_usage(share, None if transition is None else plotting.expected_dwell(transition), source)


def _predictions(data: Sequences, predicted: Any) -> Figure:
    """The longest sequence and what was expected of it."""
    longest = int(data.lengths.argmax())
    mean, half = predicted.mean[longest], _WITHIN_90 * predicted.variance[longest].sqrt()
    return plotting.predictions(data[longest], mean, mean - half, mean + half, 0.9)


def _matrix(model: Any, name: str) -> np.ndarray | None:
    """A matrix of the model's, if it has one by that name."""
    value = getattr(model, name, None)
    return value.detach().cpu().numpy() if isinstance(value, Tensor) and value.dim() == 2 else None


def _symbol_names(model: Any) -> list[str] | None:
    vocabulary = getattr(model, "vocabulary", None)
    return None if vocabulary is None else vocabulary.names


def _composition(model: Any) -> dict[str, Any]:
    matrices = {name: _matrix(model, f"{name}_probs") for name in ("transition", "emission")}
    return model.embeddings | {name: matrix for name, matrix in matrices.items() if matrix is not None}


def _excerpt(batch: Sequences, max_steps: int) -> Sequences:
    """A copy of the first sequences, the last one cut where there are too many steps; small, and on the CPU."""
    offsets = batch.offsets[: _MAX_SEQUENCES + 1].clamp(max=max_steps)
    steps = torch.arange(int(offsets[-1]))  # numbers, not a slice: a copy is wanted
    return batch.with_steps(
        steps, offsets, None if batch.weights is None else batch.weights[: len(offsets) - 1].clone()
    ).to("cpu")


def _expected_visits(model: Any, sequences: Sequences) -> np.ndarray | None:
    """(K,) expected steps in each state, each times its sequence's weight; impossible sequences have none. ``None`` for a continuous state."""
    posterior = model.posterior(sequences)
    if not hasattr(posterior, "smoothed"):
        return None
    smoothed = posterior.smoothed.values.cpu()
    weights = torch.ones(len(smoothed)) if sequences.weights is None else sequences.repeat_interleave(sequences.weights)
    visits: np.ndarray = (smoothed * weights[:, None]).sum(0).double().numpy()
    return visits
