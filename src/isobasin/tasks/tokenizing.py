# SHIM
# mypy: implicit-reexport
from isobasin.tasks.tokenizer import open_tokenizer as open_coder  # noqa: F401
