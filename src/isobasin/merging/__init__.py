"""Several models: brought into one frame, and mixed into one; the rest is mergekit's, which reads what we write."""

from isobasin.merging.document import read_recipe
from isobasin.merging.merge import Merged, merge
from isobasin.merging.recipe import Recipe

__all__ = ["Merged", "Recipe", "merge", "read_recipe"]
