# SHIM
# mypy: implicit-reexport
from isobasin.tasks.tokenizer import TOKENIZER_FILE as FILE  # noqa: F401
from isobasin.tasks.tokenizer import Vocabulary as Vocabulary
from isobasin.tasks.tokenizer import split_words as words_in  # noqa: F401
