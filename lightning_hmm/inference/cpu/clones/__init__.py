"""Compiled kernels for cloned hidden Markov models, whose operator is `inference.cloned.Blocks`."""
