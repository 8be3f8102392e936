"""Figures of a model in TensorBoard."""

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
from lightning_hmm.distributions import Gaussian, Product
from lightning_hmm.observing import reporting
from lightning_hmm.sequences import Sequences

_MAX_SEQUENCES = 256
_MAX_POSTERIOR = 2_000_000  # maximum of steps times states, which is 16 MB
_MAX_PAIRED = 2000  # maximum number of symbols for a figure of their pairs, which are 32 MB
_MAX_STATIONARY = 1000  # maximum number of states for a stationary distribution, whose cost is cubic
_MAX_PANELS = 6  # number of columns whose densities are drawn; for more columns, only the means are
_MAX_TRACKS = 32  # number of sequences on which particle filters are run for a figure
_WITHIN_90 = 1.645  # half the width, in standard deviations, of an interval with 90 % of a Gaussian


class Figures(Callback):
    """Draws figures of the model for each TensorBoard logger, during training and after the last epoch.

    - ``figures/transition_matrix`` and ``figures/emissions``: the parameters of the best restart.
    - ``figures/state_usage``: the expected occupancy of each state in some of the validation data (training data if
      there is no validation set), and the expected duration of a visit. For models without a `posterior`, the
      stationary distribution is drawn instead.
    - ``figures/convergence``: the likelihood of each epoch. The curve is stored in checkpoints and continued when
      training is resumed.
    - ``figures/composition``: for models with embeddings, the embeddings and the resulting matrices, before training
      and now. At the end of training, the embeddings are also written to TensorBoard's projector.
    - ``figures/cooccurrences``: for models that fit the frequencies of symbol pairs, the frequencies in the data and
      under the model.
    - ``figures/effective_size``, ``figures/latents`` and ``figures/predictions``: for models with particles, the
      effective sample size, the smoothed states by cluster, and one sequence with its one-step predictions.

    A figure is left out if the model does not have the required values. The step of a figure is Lightning's
    `global_step`, which is incremented once per epoch in batch EM and once per batch in online EM. If a figure cannot
    be drawn or written, a warning is issued once for each kind of figure, and training continues.

    Args:
        every_n_epochs: Number of epochs between figures. By default, figures are drawn after epochs 1, 2, 4, 8 and so
            on, because the first EM steps change the model most. A set of figures takes about half a second, which can
            be much longer than an epoch.
        max_labels: Maximum number of symbols, states or features that are labeled on an axis.
        num_clusters: Number of clusters of a continuous state.
        lead: Number of steps after which a continuous state is read; see `NeuralHMM.latents`.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import Figures
        >>> figures = Figures(every_n_epochs=10, max_labels=20)
        >>> trainer = Trainer(max_epochs=100, callbacks=[figures], logger=False, accelerator="cpu")
        >>> figures in trainer.callbacks
        True
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
        self.every_n_epochs = every_n_epochs
        self.max_labels = max_labels
        self.num_clusters = num_clusters
        self.lead = lead
        # Training log-likelihoods of all restarts and validation log-likelihood of the best one, by epoch from 1 on.
        self.train: dict[int, list[float]] = {}
        self.val: dict[int, float] = {}
        self._excerpts: dict[str, Sequences] = {}
        self._drawn_epoch = 0
        self._reported: set[str] = set()

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._excerpts, self._drawn_epoch, self._reported = {}, 0, set()
            if trainer.current_epoch == 0:
                # A new run with the same callback. The state of a checkpoint is loaded later.
                self.train, self.val = {}, {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._keep("training", trainer, pl_module, batch)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            known = isinstance(batch, Sequences) and batch.has_known_states
            self._keep("validation", trainer, pl_module, batch.without_labels() if known else batch)

    def _keep(self, part: str, trainer: Trainer, model: Any, batch: Any) -> None:
        """Stores the first batch. It is used for all figures of the run, so that they can be compared."""
        with reporting(f"Keeping some {part} data for figures", self._reported):
            if part not in self._excerpts and isinstance(batch, Sequences) and _writers(trainer):
                self._excerpts[part] = _excerpt(batch, max(1, _MAX_POSTERIOR // getattr(model, "num_states", 1)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = trainer.callback_metrics.get("val/log_likelihood")
        if trainer.state.fn == "fit" and not trainer.sanity_checking and value is not None:
            self.val[trainer.current_epoch + 1] = float(value)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        epoch = trainer.current_epoch + 1
        # If training is resumed between the validation and the end of an epoch, that epoch ends without a batch.
        if pl_module.train_likelihood.update_called:
            # Callbacks run before the module logs the value of this epoch, so the metric is computed here. It is summed
            # over the ranks, so all ranks must call `compute`.
            self.train[epoch] = pl_module.train_likelihood.compute().reshape(-1).tolist()
        if epoch & (epoch - 1) == 0 if self.every_n_epochs is None else epoch == 1 or epoch % self.every_n_epochs == 0:
            self._draw(trainer, pl_module, epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch > self._drawn_epoch:
            self._draw(trainer, pl_module, trainer.current_epoch)
        with reporting("Writing embeddings for the projector", self._reported):
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
            # Characters that the font lacks are drawn as boxes. No warning is needed for this.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            writers = _writers(trainer)
            for name, draw in self._figures(model) if writers else ():
                with reporting(f"The figure {name}", self._reported):
                    figure = draw()
                    for writer in writers if figure is not None else ():
                        writer.add_figure(f"figures/{name}", figure, trainer.global_step)

    def _figures(self, model: Any) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        """Yields the name of each figure and a function that draws it.

        The function returns ``None`` if the model does not have the required values.
        """
        transition = _matrix(model, "transition_probs")
        occupancy = functools.cache(lambda: self._occupancy(model, transition))
        if transition is not None:
            yield "transition_matrix", lambda: plotting.transition_matrix(transition, self.max_labels)
        for name, (values, labels) in getattr(getattr(model, "transition", None), "tables", {}).items():
            yield (
                name,
                functools.partial(
                    plotting.parameter_matrix, values.numpy(force=True), max_labels=self.max_labels, **labels
                ),
            )
        yield from self._emission_figures(model, occupancy)
        yield "state_usage", lambda: _state_usage(*occupancy(), transition)
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
            train = [self.train.get(epoch, unknown) for epoch in epochs]
            val = [self.val.get(epoch, np.nan) for epoch in epochs]
            yield "convergence", lambda: plotting.convergence(epochs, train, val, int(model.best_restart))

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
        self, model: Any, occupancy: Callable[[], tuple[np.ndarray | None, str]]
    ) -> Iterator[tuple[str, Callable[[], Figure | None]]]:
        """Yields one figure for each part of a product of emissions, and one figure for other emissions."""
        emission = getattr(model, "emission", None)
        if not isinstance(emission, Product):
            yield "emissions", lambda: self._emissions(model, emission, occupancy, None)
            return
        for number, (part, place) in enumerate(zip(emission.parts, emission.places, strict=True)):
            yield f"emissions_{number}", functools.partial(self._emissions, model, part, occupancy, place)

    def _emissions(
        self, model: Any, emission: Any, occupancy: Callable[[], tuple[np.ndarray | None, str]], place: list[int] | None
    ) -> Figure | None:
        """Draws the probabilities of symbols, or means and covariances, or returns ``None`` if there are neither.

        Args:
            model: The model.
            emission: Emission of the model, or a part of it.
            occupancy: Function that returns the occupancy of each state, and a description of the data.
            place: Numbers of the columns, for a part of a product.
        """
        columns: Any = getattr(model, "columns", None)
        if place is not None:
            columns = [model.columns[number] for number in place]
        if place is None:
            probs = _matrix(model, "emission_probs")
        else:
            probs = _matrix(emission, "probs") if emission.reads_symbols else None
        if probs is not None:
            return plotting.emission_matrix(
                probs, _symbol_names(model) if place is None else columns[0].category_names, self.max_labels
            )
        coefficients = getattr(emission, "coefficients", None)
        if isinstance(coefficients, Tensor):  # The densities depend on earlier observations or on inputs.
            return plotting.coefficient_matrix(coefficients.flatten(1), max_labels=self.max_labels)
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
        if not isinstance(emission, Gaussian) and means.shape[1] <= _MAX_PANELS and points is not None:
            densities = column_densities(emission, points, [column.name for column in columns])
            return plotting.column_emissions(densities, occupancy()[0])
        return plotting.gaussian_emissions(
            means,
            variances,
            occupancy()[0],
            center=getattr(emission, "center", None),
            variance=getattr(emission, "data_variance", None),
            points=points,
            max_labels=self.max_labels,
            names=names,
        )

    def _occupancy(self, model: Any, transition: np.ndarray | None) -> tuple[np.ndarray | None, str]:
        """Returns the expected fraction of steps in each state, and a description of the data it was computed from."""
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
    """Returns the TensorBoard writers. There are none on ranks other than 0."""
    return (
        [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
        if trainer.is_global_zero
        else []
    )


def column_densities(emission: Any, points: Tensor, names: list[str]) -> list[plotting.ColumnDensities]:
    """Evaluates the densities of each column on the range of the data, with all other columns missing."""
    natural, found = emission.natural(emission.restart), []
    for number, name in enumerate(names):
        observed = points[:, number].double().numpy()
        observed = observed[np.isfinite(observed)]
        if not len(observed):
            continue
        is_count = bool((observed == np.floor(observed)).all())
        if is_count:
            low, high = observed.min(), max(observed.max(), observed.min() + 1)
            values = np.unique(np.linspace(low, high, min(int(high - low) + 1, 400)).round())
        else:
            low, high = np.quantile(observed, 0.005), np.quantile(observed, 0.995)
            values = np.linspace(low, high, 400)
        grid = torch.full((len(values), len(names)), torch.nan, dtype=torch.float64)
        grid[:, number] = torch.from_numpy(values)
        with torch.no_grad():
            rows = emission.evidence(natural, Sequences.from_list([grid]).to(natural[0].device)).rows()
        found.append(plotting.ColumnDensities(values, rows.exp().cpu().numpy(), observed, name, is_count))
    return found


def _state_usage(occupancy: np.ndarray | None, source: str, transition: np.ndarray | None) -> Figure | None:
    if occupancy is None and transition is None:
        return None
    return plotting.state_usage(occupancy, None if transition is None else plotting.expected_dwell(transition), source)


def _predictions(data: Sequences, predicted: Any) -> Figure:
    """Draws the longest sequence with its one-step predictions."""
    longest = int(data.lengths.argmax())
    mean, half = predicted.mean[longest], _WITHIN_90 * predicted.variance[longest].sqrt()
    return plotting.predictions(data[longest], mean, mean - half, mean + half, 0.9)


def _matrix(model: Any, name: str) -> np.ndarray | None:
    """Returns an attribute of the model as an array, or ``None`` if it is not a matrix."""
    value = getattr(model, name, None)
    return value.detach().cpu().numpy() if isinstance(value, Tensor) and value.dim() == 2 else None


def _symbol_names(model: Any) -> list[str] | None:
    vocabulary = getattr(model, "vocabulary", None)
    return None if vocabulary is None else vocabulary.names


def _composition(model: Any) -> dict[str, Any]:
    matrices = {name: _matrix(model, f"{name}_probs") for name in ("transition", "emission")}
    return model.embeddings | {name: matrix for name, matrix in matrices.items() if matrix is not None}


def _excerpt(batch: Sequences, max_steps: int) -> Sequences:
    """Copies the first sequences, with at most `max_steps` steps, to the CPU. The last one may be truncated."""
    offsets = batch.offsets[: _MAX_SEQUENCES + 1].clamp(max=max_steps)
    steps = torch.arange(int(offsets[-1]))  # indices make a copy, unlike a slice
    return batch.with_steps(
        steps, offsets, None if batch.weights is None else batch.weights[: len(offsets) - 1].clone()
    ).to("cpu")


def _expected_visits(model: Any, sequences: Sequences) -> np.ndarray | None:
    """Returns the (K,) expected numbers of steps in each state, weighted by sequence.

    Impossible sequences are ignored. For a continuous state, ``None`` is returned.
    """
    posterior = model.posterior(sequences)
    if not hasattr(posterior, "smoothed"):
        return None
    smoothed = posterior.smoothed.values.cpu()
    weights = torch.ones(len(smoothed)) if sequences.weights is None else sequences.repeat_interleave(sequences.weights)
    visits: np.ndarray = (smoothed * weights[:, None]).sum(0).double().numpy()
    return visits
