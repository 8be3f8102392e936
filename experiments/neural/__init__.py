"""Experiments of Jarboui and Perchet (2021), neural HMMs with continuous states."""
