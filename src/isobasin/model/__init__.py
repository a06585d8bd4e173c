"""The project's own compact Transformer: one module with switches, the study's ViT, BERT, GPT-2 and Llama."""

from .config import ModelConfig as ModelConfig
from .transformer import Transformer as Transformer
