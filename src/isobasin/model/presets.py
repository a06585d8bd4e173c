# SHIM
# mypy: implicit-reexport
from isobasin.model.config import preset_settings as preset_settings
