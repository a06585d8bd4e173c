"""The project's own compact Transformer: one module with switches, the study's ViT, BERT, GPT-2 and Llama.

>>> from isobasin.model import ModelConfig, Transformer
>>> config = ModelConfig.preset("llama", positions="rope", d_model=32, n_layers=1, n_positions=8)
>>> Transformer(config, seed=0)(torch.tensor([[1, 2, 3]])).shape
torch.Size([1, 3, 256])
"""

from .config import ModelConfig
from .transformer import Transformer

__all__ = ["ModelConfig", "Transformer"]
