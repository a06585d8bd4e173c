"""A merge on its way to the disk: a few blocks are read and mixed at a time while others are written."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from isobasin.checkpoint import CheckpointWriter
from isobasin.merging.mixing import Method, Mixture
from isobasin.merging.sources import Source

BLOCK_BYTES = 2**23
WORKERS = 4

Block = tuple[str, Source, Mixture, int, int]


def write_mixed(
    writer: CheckpointWriter,
    sources: Mapping[str, Source],
    method: Method,
    *,
    block_bytes: int = BLOCK_BYTES,
    watch: Callable[[str], None] | None = None,
) -> None:
    """Write every tensor of `sources` (by its name on disk), in the order of the files.

    Stored tensors go in blocks of numbers, mixed by a pool of threads, never more than two beyond its size in memory;
    a moved one is computed whole, alone, in its turn.
    """
    workers = min(WORKERS, max(2, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        pending: deque[tuple[Block, Future[Tensor]]] = deque()

        def drain(down_to: int) -> None:
            while len(pending) > down_to:
                (disk, source, _, start, stop), future = pending.popleft()
                writer.write_flat(disk, start, future.result())
                if watch and stop == source.size:
                    watch(disk)

        try:
            for disk in writer.order:
                source = sources[disk]
                if not source.in_blocks or not source.size:
                    drain(0)
                    writer.write(disk, source.whole(method), finite=not source.buffer)
                    if watch:
                        watch(disk)
                    continue
                for block in _blocks(disk, source, source.mixture(method), block_bytes):
                    pending.append((block, pool.submit(_mixed, block)))
                    drain(workers + 2)
            drain(0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _mixed(block: Block) -> Tensor:
    _, source, mixture, start, stop = block
    return source.mixed(mixture, source.block(start, stop))


def _blocks(disk: str, source: Source, mixture: Mixture, size: int) -> Iterator[Block]:
    step = max(1, size // source.dtype.itemsize)
    for start in range(0, source.size, step):
        yield disk, source, mixture, start, min(start + step, source.size)
