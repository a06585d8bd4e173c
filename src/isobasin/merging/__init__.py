"""Merging models of one architecture: joint alignment into one frame, then linear or slerp merging.

The package is not called `merge`, because importing a subpackage of that name would hide the function `isobasin.merge`.
"""

from isobasin.merging.merge import MergeResult, merge
from isobasin.merging.recipe import MergeRecipe, read_recipe

__all__ = ["MergeRecipe", "MergeResult", "merge", "read_recipe"]
