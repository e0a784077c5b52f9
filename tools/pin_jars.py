"""Writes spark_jobs/jars.sha256: the digests of all jars that this version may download, for each Spark and Hadoop.

Run it when a version of delta-spark, pyspark or Hadoop is added, with a repository that you trust, and check the
difference: existing digests must not change.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from spark_jobs.jars import AWS, DIGESTS, download, s3_modules

SPARK_LINES = ("4.0", "4.1", "4.2")
DELTA_VERSIONS = ("4.4.0",)


def main() -> None:
    """Download everything and write the file."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), dict[str, str]()
        for line in SPARK_LINES:
            for delta in DELTA_VERSIONS:
                download([("io.delta", f"delta-spark_{line}_2.13", delta)], folder / f"delta-{line}-{delta}")
        for hadoop in AWS:
            download([("org.apache.hadoop", "hadoop-aws", hadoop)], folder / f"hadoop-{hadoop}", is_alone=True)
            download(s3_modules(hadoop), folder / f"aws-{hadoop}")
        for jar in folder.rglob("*.jar"):
            digest = hashlib.sha256(jar.read_bytes()).hexdigest()
            if found.setdefault(jar.name, digest) != digest:
                raise SystemExit(f"two jars have the name {jar.name}")
    DIGESTS.write_text("".join(f"{digest}  {jar}\n" for jar, digest in sorted(found.items())))


if __name__ == "__main__":
    main()
