"""The paper's protocol: train, re-initialise, fine-tune, align, interpolate.

>>> import torch
>>> from isobasin.model import ModelConfig, Transformer
>>> from isobasin.study import TrainingRecipe, reinitialise, train
>>> config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, n_classes=2)
>>> tokens, classes = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]]), torch.tensor([0, 1])
>>> trained = train(Transformer(config), tokens, classes, TrainingRecipe(steps=3, batch_size=2), seed=0)
>>> len(trained.losses)
3
>>> sibling = reinitialise(trained.model, "all-attention", seed=1)
"""

from isobasin.study.models import reinitialise, scope_parameters
from isobasin.study.trainer import TrainingRecipe, TrainResult, train
from isobasin.symmetries import SCOPES
from isobasin.tasks.datasets import shifted

__all__ = ["SCOPES", "TrainResult", "TrainingRecipe", "reinitialise", "scope_parameters", "shifted", "train"]
