"""Making few large files out of many small ones, in a history.

1. The rows of all small batches are written once more, in order, to `_staging/ID`.
2. `_compaction/ID.plan` is written: from here on it is only finished, never taken back.
3. The small batches are deleted, then `_compaction/ID.cleared` is written.
4. The new files are moved to the folder of the last of those batches.
5. The plan is deleted.

`finish` does steps 3 to 5 from wherever a kill has left them. A program that reads `events/` as it is misses the rows
of the small batches from step 3 to the end of 4; after a kill there, until the next ingest. `read_history` follows the
plan and does not.
"""

import json
import secrets

from pyspark.sql import SparkSession

from forq.errors import ForqError
from forq.pipeline.folder import Folder
from forq.pipeline.rows import read_rows, write_rows

EVENTS_FOLDER = "events"
STAGING = "_staging"
_PLANS = "_compaction"
_MARKERS = "_published"

# A batch below this size is small; so many of them are put together.
SMALL_BYTES = 16 * 1024 * 1024
MANY = 32


def batch_folder(number: int) -> str:
    return f"{EVENTS_FOLDER}/batch={number}"


def marker(number: int) -> str:
    return f"{_MARKERS}/{number}"


class Compaction:
    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self.folder = folder
        self._spark = spark

    def batches(self) -> list[int]:
        """Those that are complete, in order."""
        return sorted(int(name) for name in self.folder.names(_MARKERS) if name.isdigit())

    def run(self, before: int, many: int = MANY) -> int:
        """Puts small batches with a number below `before` together if there are many; how many that were.

        `before`: the batch that Spark may still repeat, or the one after the last.
        """
        small = [number for number in self.batches() if number < before and self._bytes(number) < SMALL_BYTES]
        if len(small) < many:
            return 0
        name = f"compact-{secrets.token_hex(4)}"
        self._stage(small, f"{STAGING}/{name}")
        self.folder.write(f"{_PLANS}/{name}.plan", json.dumps({"sources": small, "target": small[-1]}))
        self.finish()
        return len(small)

    def finish(self) -> None:
        """Carries out the plans that are there."""
        plans = self._plans()
        for name, (sources, target) in plans.items():
            if not self.folder.exists(f"{_PLANS}/{name}.cleared"):
                for number in sources:
                    self.folder.delete(batch_folder(number))
                    if number != target:
                        self.folder.delete(marker(number))
                self.folder.make(batch_folder(target))
                self.folder.write(f"{_PLANS}/{name}.cleared", "")
            for file in self.folder.files(f"{STAGING}/{name}", ".parquet"):
                self.folder.move_file(f"{STAGING}/{name}/{file}", f"{batch_folder(target)}/{file}")
            self.folder.delete(f"{_PLANS}/{name}.plan")
            self.folder.delete(f"{STAGING}/{name}")
        self.folder.delete(_PLANS)

    def visible(self) -> list[tuple[str, list[str]]] | None:
        """Where each row is once, by the plans too, as `read_rows` wants it; None if that changed during the look."""
        plans = self._plans()
        replaced = {number for sources, _ in plans.values() for number in sources}
        moved_to = {target for name, (_, target) in plans.items() if self.folder.exists(f"{_PLANS}/{name}.cleared")}
        placed = [number for number in self.batches() if number not in replaced or number in moved_to]
        staged = [f"{STAGING}/{name}" for name in plans]
        if self._plans() != plans or not all(map(self.folder.exists, [*map(batch_folder, placed), *staged])):
            return None
        return [self._root(placed), *((self.folder.path(name), [self.folder.path(name)]) for name in staged)]

    def _stage(self, small: list[int], staged: str) -> None:
        rows = read_rows(self._spark, [self._root(small)])
        in_order = rows.repartition("queue").sortWithinPartitions("queue", "epoch", "sequence", "position")
        write_rows(in_order, self.folder.path(staged))
        self.folder.make(staged)
        written = read_rows(self._spark, [(self.folder.path(staged), [self.folder.path(staged)])]).count()
        if written != (expected := rows.count()):
            raise ForqError(f"compaction wrote {written} rows of {expected}: nothing was replaced")

    def _root(self, numbers: list[int]) -> tuple[str, list[str]]:
        return self.folder.path(EVENTS_FOLDER), [self.folder.path(batch_folder(number)) for number in numbers]

    def _plans(self) -> dict[str, tuple[list[int], int]]:
        plans = {}
        for file in self.folder.names(_PLANS):
            text = self.folder.read(f"{_PLANS}/{file}") if file.endswith(".plan") else None
            if text is not None:
                plan = json.loads(text)
                plans[file.removesuffix(".plan")] = (list(plan["sources"]), int(plan["target"]))
        return plans

    def _bytes(self, number: int) -> int:
        return sum(self.folder.files(batch_folder(number), ".parquet").values())
