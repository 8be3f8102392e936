"""Experiments of Sicking et al. (2020), DenseHMM."""
