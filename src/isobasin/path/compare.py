# SHIM
# mypy: implicit-reexport
from isobasin.path.pairs import Aligner as Aligner
from isobasin.path.pairs import PairResult as Compared  # noqa: F401
from isobasin.path.pairs import evaluate_pairs as compare  # noqa: F401
from isobasin.path.pairs import path_document as result_of  # noqa: F401
