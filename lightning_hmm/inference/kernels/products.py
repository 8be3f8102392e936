"""Products of small matrices."""

from __future__ import annotations

from lightning_hmm.inference.kernels.simd import make_product

multiply = make_product(max_plus=False, accumulate=False)
multiply_add = make_product(max_plus=False, accumulate=True)
