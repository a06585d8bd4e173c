# SHIM
# mypy: implicit-reexport
from isobasin.model.transformer import CONFIG_NAME as CONFIG_NAME
from isobasin.model.transformer import WEIGHTS_NAME as WEIGHTS_NAME
from isobasin.model.transformer import read_folder as read_folder
