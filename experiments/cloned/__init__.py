"""Experiments of Dedieu et al. (2019), cloned HMMs."""
