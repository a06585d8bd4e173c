# SHIM
# mypy: implicit-reexport
from isobasin.study.results import SCOPE_TITLES as SCOPE_TITLES  # noqa: F401
from isobasin.study.results import STAGES as STAGES  # noqa: F401
from isobasin.study.results import PositionComparison as Facing  # noqa: F401
from isobasin.study.results import Score as Score  # noqa: F401
from isobasin.study.results import Sweep as Sweep  # noqa: F401
from isobasin.study.results import ablation as ablation  # noqa: F401
from isobasin.study.results import by_scope as by_scope  # noqa: F401
from isobasin.study.results import counts as counts  # noqa: F401
from isobasin.study.results import data_name as data_name  # noqa: F401
from isobasin.study.results import distance_cells as distance_cells  # noqa: F401
from isobasin.study.results import is_main as is_main  # noqa: F401
from isobasin.study.results import mean as mean  # noqa: F401
from isobasin.study.results import model_name as model_name  # noqa: F401
from isobasin.study.results import position_comparisons as facing_cells  # noqa: F401
from isobasin.study.results import positions_name as positions_name  # noqa: F401
from isobasin.study.results import quality as quality  # noqa: F401
from isobasin.study.results import scores as scores  # noqa: F401
from isobasin.study.results import size_name as size_name  # noqa: F401
from isobasin.study.results import stage2_cells as stage2_cells  # noqa: F401
from isobasin.study.results import summary_row as summary_row  # noqa: F401
from isobasin.study.results import sweeps as sweeps  # noqa: F401
from isobasin.study.results import title as title  # noqa: F401
