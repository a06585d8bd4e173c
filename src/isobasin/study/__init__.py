"""The paper's protocol: train, re-initialise, fine-tune, align, interpolate.

>>> from isobasin.model import ModelConfig, Transformer
>>> from isobasin.study import Recipe, reinitialise, train
>>> config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, n_classes=2)
>>> tokens, classes = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]]), torch.tensor([0, 1])
>>> trained = train(Transformer(config), tokens, classes, Recipe(steps=3, batch_size=2), seed=0)
>>> len(trained.losses)
3
>>> sibling = reinitialise(trained.model, "all-attention", seed=1)
"""

from .augmentation import shifted
from .recipe import Recipe
from .reinitialising import SCOPES, reinitialise, scope_parameters
from .training import Trained, train

__all__ = ["SCOPES", "Recipe", "Trained", "reinitialise", "scope_parameters", "shifted", "train"]
