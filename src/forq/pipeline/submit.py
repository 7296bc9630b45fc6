"""The program for spark-submit: `spark-submit [--master URL …] $(python -m forq.pipeline.submit) audit --history URL`.

Without spark-submit it prints its own path.
"""

import argparse
import sys

from forq.pipeline import cli
from forq.pipeline.session import under_spark_submit


def main(argv: list[str]) -> int:
    if not under_spark_submit():
        print(__file__)
        return 0
    parser = argparse.ArgumentParser(prog="forq pipeline")
    cli.add_commands(parser)
    return cli.run(parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
