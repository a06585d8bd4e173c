"""Merging models of one architecture: joint alignment into one frame, then linear or slerp merging.

The package is not called `merge`, because importing a subpackage of that name would hide the function `isobasin.merge`.
"""

from isobasin.merging.merge import MergeResult as MergeResult
from isobasin.merging.merge import merge as merge
from isobasin.merging.recipe import MergeRecipe as MergeRecipe
from isobasin.merging.recipe import read_recipe as read_recipe
