"""Products of small matrices, and the options that kernels are compiled with."""

from __future__ import annotations

from numba import njit

from lightning_hmm.inference.kernels.simd import make_product

multiply = make_product(max_plus=False, accumulate=False)
multiply_add = make_product(max_plus=False, accumulate=True)

kernel = njit(nogil=True, cache=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})
# For kernels in which comparisons with NaN and -inf decide, and sums are as written.
strict_kernel = njit(nogil=True, cache=True, error_model="numpy")
