"""Publishing what was made: a folder is saved and uploaded to the Hugging Face hub."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

from isobasin.errors import IsobasinError


@runtime_checkable
class Saved(Protocol):
    """What can be saved as a folder: `Weights`, the result of `merge`, an adapter."""

    def save(self, out: str | Path, /, **options: Any) -> Any: ...


def push_to_hub(
    result: Saved,
    repo_id: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload with isobasin",
    token: str | None = None,
    **options: Any,
) -> str:
    """Save a model, a merge or an adapter, upload it, and return the address of the commit.

    >>> push_to_hub(merge([a, b]), "me/merged", private=True)  # doctest: +SKIP

    The repository, and the branch `revision`, are created where they do not exist; files of it that are not written
    stay. `options` are those of `save`. The token is that of `hf auth login` unless given.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalTokenNotFoundError,
            OfflineModeIsEnabled,
        )
    except ImportError as error:
        raise IsobasinError("push_to_hub needs the package huggingface_hub: pip install huggingface_hub") from error
    with TemporaryDirectory() as place:
        result.save(Path(place) / "model", **options)
        try:
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            done = api.upload_folder(
                repo_id=repo_id, folder_path=Path(place) / "model", revision=revision, commit_message=message
            )
        except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError) as error:
            raise _failed(repo_id, error, "log in with `hf auth login`, and give a name such as me/model") from error
        except OfflineModeIsEnabled as error:
            raise _failed(repo_id, error, "or save it with `.save(folder)` and upload it later") from error
        except Exception as error:  # of whatever library does the transfer
            raise _failed(repo_id, error, "check the network; `.save(folder)` keeps the result") from error
    return str(done)


def _failed(repo_id: str, error: Exception, advice: str) -> IsobasinError:
    words = str(error).splitlines() or [type(error).__name__]
    return IsobasinError(f"{repo_id}: can not be uploaded ({words[0]:.200}); {advice}")
