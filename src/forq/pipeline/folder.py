"""A folder on any file system that Hadoop knows (a local path, hdfs://, s3a:// …), through Spark's JVM.

Nothing here needs more of a file system than that one file is moved or written whole or not at all.
"""

from typing import Any

from pyspark.sql import SparkSession

from forq.errors import ForqError


class Folder:
    """Names are relative to the folder, with slashes."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        jvm: Any = spark._jvm
        self._make_path = jvm.org.apache.hadoop.fs.Path
        self._io = jvm.org.apache.commons.io.IOUtils
        self._charset = jvm.java.nio.charset.StandardCharsets.UTF_8
        path = self._make_path(url)
        self._files: Any = path.getFileSystem(spark._jsc.hadoopConfiguration())
        self._root = self._files.makeQualified(path)
        self.url: str = self._root.toString()
        uri = self._root.toUri()
        self.local_path: str | None = uri.getPath() if uri.getScheme() == "file" else None
        if self.local_path is not None:
            # Without the hidden file of checksums beside each file, at which other programs stumble.
            self._files = self._files.getRawFileSystem()

    def path(self, name: str) -> str:
        """The whole URL, as Spark's readers and writers want it."""
        return f"{self.url.rstrip('/')}/{name}"

    def exists(self, name: str) -> bool:
        return bool(self._files.exists(self._at(name)))

    def names(self, name: str) -> list[str]:
        """What is in a folder; nothing if there is none."""
        at = self._at(name)
        if not self._files.exists(at):
            return []
        return sorted(status.getPath().getName() for status in self._files.listStatus(at))

    def files(self, name: str, suffix: str) -> dict[str, int]:
        """Every file below a folder whose name ends so, relative to that folder, with its size."""
        at = self._at(name)
        if not self._files.exists(at):
            return {}
        top = self._files.makeQualified(at).toString().rstrip("/") + "/"
        found, listed = {}, self._files.listFiles(at, True)
        while listed.hasNext():
            status = listed.next()
            path = status.getPath().toString()
            if path.endswith(suffix):
                found[path.removeprefix(top)] = int(status.getLen())
        return found

    def make(self, name: str) -> None:
        self._files.mkdirs(self._at(name))

    def move_file(self, source: str, target: str) -> None:
        """Moves one file; what is at its new place already (of a move that was cut off) is replaced."""
        to = self._at(target)
        self._files.mkdirs(to.getParent())
        if self._files.exists(to):
            self._files.delete(to, False)
        if not self._files.rename(self._at(source), to):
            raise ForqError(f"cannot move {self.path(source)} to {target}")

    def delete(self, name: str) -> None:
        """A file or a folder with all that is in it; nothing happens if there is none."""
        at = self._at(name)
        if self._files.exists(at) and not self._files.delete(at, True):
            raise ForqError(f"cannot delete {self.path(name)}")

    def read(self, name: str) -> str | None:
        at = self._at(name)
        if not self._files.exists(at):
            return None
        stream = self._files.open(at)
        try:
            return str(self._io.toString(stream, self._charset))
        finally:
            stream.close()

    def write(self, name: str, text: str) -> None:
        """Makes a small file, whole or not at all. One that is there is replaced, and missing for a moment."""
        fresh = f"{name}.new"
        stream = self._files.create(self._at(fresh), True)
        try:
            self._io.write(text, stream, self._charset)
        finally:
            stream.close()
        self.move_file(fresh, name)

    def _at(self, name: str) -> Any:
        return self._make_path(self.path(name))
