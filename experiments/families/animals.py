"""Simulates the tracks of five animals, the data of the configurations in `configs/families`.

Each animal is in one of three states, foraging, resting and travelling, and each column of the table has another
distribution given the state. The observation times are irregular, the state is recorded for a tenth of the rows, and
one entry in fifty is missing. `python -m experiments.families.animals` writes `configs/families/animals.csv`.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

STATES = ("foraging", "resting", "travelling")
TRANSITION = np.array([[0.90, 0.06, 0.04], [0.08, 0.90, 0.02], [0.05, 0.05, 0.90]])
FILE = Path(__file__).parents[2] / "configs/families/animals.csv"
NUM_ANIMALS, NUM_ROWS = 5, 120
MISSING, LABELED = 0.02, 0.1  # fractions of entries and of rows


def simulate(seed: int = 0) -> list[dict[str, str]]:
    """Returns the rows of the table."""
    rng = np.random.default_rng(seed)
    rows = []
    for animal in range(NUM_ANIMALS):
        state, hour, temperature = int(rng.integers(3)), 0.0, 20.0
        for _ in range(NUM_ROWS):
            tide = float(np.sin(2 * np.pi * hour / 12.4))
            columns = observe(state, tide, temperature, rng)
            temperature = columns["temperature"]
            missing = {name: rng.random() < MISSING for name in columns}
            missing["squid"] = missing["crab"] = missing["fish"]  # captures are counted together
            entries = {name: "" if missing[name] else f"{value:.6g}" for name, value in columns.items()}
            label = STATES[state] if rng.random() < LABELED else ""
            rows.append(
                {"animal": f"seal {animal}", "hour": f"{hour:.2f}", "tide": f"{tide:.4f}", **entries, "behavior": label}
            )
            hour += float(rng.choice([0.5, 1.0, 2.0]))
            state = int(rng.choice(3, p=TRANSITION[state]))
    return rows


def observe(state: int, tide: float, temperature: float, rng: np.random.Generator) -> dict[str, float]:
    """Draws one observation of each column."""
    fish, squid, crab = rng.multinomial(8, ([0.6, 0.3, 0.1], [0.1, 0.2, 0.7], [0.2, 0.6, 0.2])[state])
    return {
        "step": rng.gamma((3.0, 1.5, 8.0)[state], (0.2, 0.05, 0.3)[state]),  # kilometers
        "angle": rng.vonmises(0.0, (0.6, 0.3, 6.0)[state]),  # radians
        "dives": float(rng.poisson((6.0, 0.5, 2.0)[state])),
        "captures": float((rng.random() > 0.3) * rng.negative_binomial(2.0, (0.2, 0.7, 0.5)[state])),
        "calls": float(rng.binomial(10, (0.3, 0.05, 0.7)[state])),
        "submerged": rng.beta(*((4.0, 4.0), (1.5, 8.0), (6.0, 2.0))[state]),  # fraction of the time
        "ashore": float(rng.random() < (0.05, 0.8, 0.02)[state]),
        "depth": rng.weibull((1.5, 1.0, 2.5)[state]) * (30.0, 3.0, 12.0)[state],  # meters
        "pause": rng.exponential((1.0, 5.0, 0.3)[state]),  # minutes
        "heart_rate": (90.0, 60.0, 110.0)[state] + 12.0 * tide + rng.standard_t(4) * 4.0,
        "temperature": (4.0, 6.0, 3.0)[state] + 0.8 * temperature + rng.normal() * 0.5,
        "fish": float(fish),
        "squid": float(squid),
        "crab": float(crab),
    }


def main() -> None:
    rows = simulate()
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows written to {FILE}.")


if __name__ == "__main__":
    main()
