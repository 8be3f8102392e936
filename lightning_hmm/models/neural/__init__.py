"""Neural HMMs: hidden Markov models of real vectors whose densities are networks (Jarboui and Perchet, 2021).

To follow an EM iteration of `NeuralHMM` from the data to the gradient, read the modules in this order:

1. `networks`: a window of past observations and a state enter a network, whose outputs are the parameters of a density
   (`distributions.densities`). The result is a `ConditionalDensity`; a model has one for the transition and one for the
   emission.
2. `units`: the sequences of a batch become `Observations`, standardized with the mean and variance of the training
data. 3. `state_space`: model and observations become a `BoundModel`, which is all that the particle filter needs
   (`inference.particle`). `PathDensity` is the complete-data log-density of paths that were drawn, and its gradient.
4. `particle_em`: the training loop. A batch is subsampled, bound, filtered, paths are drawn (E-step), and `m_steps`
gradient
   steps follow (M-step).
5. `rollout`: draws the future of a sequence, for predictions and samples.
6. `starts`: initial networks for a state that changes slowly.
7. `model`: `NeuralHMM`, which puts the parts together and implements scoring, decoding, prediction and sampling.
8. `discrete`: `NeuralDiscreteHMM`, which has K states and exact inference, and shares the first two modules and the
rollout.
"""

from lightning_hmm.models.neural.discrete import NeuralDiscreteHMM
from lightning_hmm.models.neural.model import Decoded, NeuralHMM, OneStepPredictions, Prediction, Score

__all__ = ["Decoded", "NeuralDiscreteHMM", "NeuralHMM", "OneStepPredictions", "Prediction", "Score"]
