"""Writes the tables and the figure of `docs/families.md`.

``python -m experiments.families.table``

The rows are computed from the classes, from instances with the smallest sizes that differ from each other, and from the
configurations in `configs/families`. The text between the tables is part of the page.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
import yaml

import lightning_hmm
from experiments.families.figure import figure
from experiments.records import markdown_table
from lightning_hmm import (
    HMM,
    Autoregressive,
    Binomial,
    Column,
    EmbeddedCategorical,
    EmbeddedGaussian,
    Emission,
    Gamma,
    Gaussian,
    GaussianMixture,
    Initial,
    Mixture,
    Poisson,
    Product,
    Regression,
    TorchEmission,
    Transition,
    ZeroInflated,
)
from lightning_hmm.distributions import AroundMean

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs/families"
PAGE = ROOT / "docs/families.md"
SIZES = {7: "K", 5: "D", 11: "V", 3: "C", 2: "L", 4: "P"}
# Instances of the classes that have required arguments, or parameters that depend on them.
EXAMPLES: dict[type[Emission], Callable[[], list[Emission]]] = {
    AroundMean: lambda: [Autoregressive(2, around_mean=True)],
    Autoregressive: lambda: [Autoregressive(2), Autoregressive(2, "full")],
    Binomial: lambda: [Binomial(10)],
    EmbeddedCategorical: lambda: [EmbeddedCategorical(2)],
    EmbeddedGaussian: lambda: [EmbeddedGaussian(2)],
    Gaussian: lambda: [Gaussian(), Gaussian("full")],
    GaussianMixture: lambda: [GaussianMixture(3), GaussianMixture(3, "full")],
    Mixture: lambda: [Mixture(Gamma(), 3)],
    Regression: lambda: [Regression("gaussian", inputs=4)],
    ZeroInflated: lambda: [ZeroInflated(Poisson())],
}
WITHOUT_NAMES = {Product: "those of the parts", TorchEmission: "those of the module"}
# Classes other than emissions, with the configurations that use them.
STRUCTURES = {
    "Full": "structured",
    "LeftRight": "left_right",
    "InputDriven": "input_driven",
    "ContinuousTime": "continuous_time",
    "Durations": "semi_markov",
    "SemiMarkovHMM": "semi_markov",
    "Histories": "around_mean",
    "Components": "mixture_of_hmms",
    "MixtureOfHMMs": "mixture_of_hmms",
    "DenseMostlyConstant": None,
    "EmbeddedTransition": None,
    "Clones": None,
    "Initial": None,
    "Stationary": "structured",
    "InputDrivenInitial": "input_driven",
}
# Options of models that do not concern the structure.
COMMON = {*inspect.signature(HMM).parameters} - {"num_states"} | {"most_held", "learning_rate", "initial_pseudocount"}


def families() -> Iterator[type[Emission]]:
    """Yields the classes of emissions that the package exports."""
    for name in lightning_hmm.__all__:
        found = getattr(lightning_hmm, name)
        if inspect.isclass(found) and issubclass(found, Emission) and found is not Emission:
            yield found
        if found is Autoregressive:
            yield AroundMean


def use_of(family: type) -> str:
    """Returns the sentence of the docstring that begins with "Use it", without these words."""
    text = " ".join((inspect.getdoc(family) or "").split())
    found = re.search(r"Use it (.*?)\.(?: |$)", text)
    if found is None:
        raise ValueError(f"The docstring of {family.__name__} must have a sentence that begins with 'Use it'.")
    return found[1].replace("|", r"\|")


def parameters_of(family: type[Emission]) -> str:
    """Returns the names of the parameters with their shapes."""
    if family in WITHOUT_NAMES:
        return WITHOUT_NAMES[family]
    found = {}
    for emission in EXAMPLES.get(family, lambda: [family()])():
        if not emission.names:
            continue
        columns = [Column("x", "categorical", 11)] if emission.reads_symbols else [Column(name) for name in "abcde"]
        model = HMM(7, emission, columns=columns[:1] if family is AroundMean else columns)
        for name in emission.names:
            part = model.emission if hasattr(model.emission, name) else model.emission.component
            found[name] = shape_of(getattr(part, name))
    return ", ".join(f"`{name}` {shape}" for name, shape in found.items() if name != "components") or "none"


def shape_of(value: torch.Tensor) -> str:
    return f"({', '.join(SIZES.get(size, str(size)) for size in value.shape)})"


def configurations() -> dict[str, list[str]]:
    """Returns, for each class of emission, the names of the configurations that train it."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        emission = yaml.safe_load(path.read_text())["model"]["init_args"]["emission"]["class_path"]
        found.setdefault(emission.rpartition(".")[2], []).append(path.stem)
    return found


def link(name: str | None) -> str:
    return "" if name is None else f"[{name}](../configs/families/{name}.yaml)"


def configurations_of(family: type[Emission], by_class: Mapping[str, list[str]]) -> str:
    """Returns links to the configurations that are named after the family, or else to all that use it."""
    found = by_class.get(family.__name__, [])
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", family.__name__).lower()
    return ", ".join(link(stem) for stem in [stem for stem in found if stem.endswith(name)] or found)


def emission_table() -> str:
    by_class = configurations()
    rows = [
        [
            f"`{family.__name__}`",
            family.support[0],
            parameters_of(family),
            family.m_step,
            use_of(family),
            configurations_of(family, by_class),
        ]
        for family in families()
    ]
    header = ["family", "support", "parameters", "M-step", "use it", "configuration"]
    return markdown_table(header, rows).replace("---:", "---")


def structure_table() -> str:
    rows = []
    for name, stem in STRUCTURES.items():
        part = getattr(lightning_hmm, name)
        kind = "transition" if issubclass(part, Transition) else "start" if issubclass(part, Initial) else "model"
        options = [option for option in inspect.signature(part).parameters if option not in COMMON]
        summary = " ".join((inspect.getdoc(part) or "").split("\n\n")[0].split())
        summary = re.sub(r", :math:`.*?`", "", summary).split(". ")[0].rstrip(".")
        rows.append([f"`{name}`", kind, ", ".join(f"`{option}`" for option in options), summary, link(stem)])
    return markdown_table(["class", "kind", "options", "description", "configuration"], rows).replace("---:", "---")


def with_tables(page: str) -> str:
    """Returns the text of the page with new tables between their marks."""
    for name, table in {"emissions": emission_table(), "structure": structure_table()}.items():
        before, rest = page.split(f"<!-- {name} -->\n")
        _, after = rest.split(f"<!-- end of {name} -->\n")
        page = f"{before}<!-- {name} -->\n\n{table}\n<!-- end of {name} -->\n{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
    if "--tables" not in sys.argv[1:]:
        figure().savefig(PAGE.with_suffix(".png"), dpi=110)
